"""Attention kernels that this project did not write, as backends of the suite."""
