"""Benchmarks; ``python -m paged_mla_optimized.tools.bench`` compares decode with other kernels."""
