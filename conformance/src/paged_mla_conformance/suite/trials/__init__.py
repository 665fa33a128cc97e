"""How one test uses a backend: load, call and compare."""
