"""Faults of kernels: each exchanges a function of the oracle for a wrong one."""
