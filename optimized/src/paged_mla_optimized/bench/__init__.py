"""``python -m paged_mla_optimized.bench``: decode beside its ceilings and other kernels."""
