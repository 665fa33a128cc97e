"""Kernels that every architecture runs."""
