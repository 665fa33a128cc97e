"""``python -m paged_mla_optimized.tools.bench``: decode beside its ceilings and other kernels."""
