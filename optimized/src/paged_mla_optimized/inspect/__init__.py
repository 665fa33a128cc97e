"""Dumps of steps, and intermediate results of kernels."""
