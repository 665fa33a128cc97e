"""Commands of ``paged-mla`` that need the kernels."""
