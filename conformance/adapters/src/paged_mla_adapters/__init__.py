"""Backends of the suite for attention kernels of other projects."""
