"""Kernels that prepare the device for a call. They import only Triton."""
