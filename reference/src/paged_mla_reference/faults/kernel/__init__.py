"""Faults of kernels: each replaces a function of the oracle by a wrong one."""
