"""A replacement for FastDeploy's latent attention.

FastDeploy lists its backends in an enum, and other packages cannot register a backend. A subclass
of ``MLAAttentionBackend`` calls this package if ``k`` is ``None``; docs/engines.md shows how.
"""
