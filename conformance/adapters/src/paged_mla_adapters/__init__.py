"""Attention kernels that this project did not write, as backends of the suite."""

__version__ = "0.1.0"
