"""Attention kernels in Triton, for every architecture."""
