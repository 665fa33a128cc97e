"""Kernels and helper functions that every architecture uses."""
