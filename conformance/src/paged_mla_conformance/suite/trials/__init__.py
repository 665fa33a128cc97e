"""The code with which a test uses a backend: it loads caches, makes calls and compares outputs."""
