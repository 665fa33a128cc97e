"""Launches of the kernels: grids, arguments, constants."""
