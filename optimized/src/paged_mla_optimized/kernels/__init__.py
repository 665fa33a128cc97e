"""Triton and Gluon kernels. The Triton kernels also run in Triton's interpreter."""
