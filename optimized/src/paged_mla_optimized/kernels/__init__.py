"""Triton kernels. They import nothing but Triton, and also run in its interpreter."""
