"""Attention kernels in Gluon, for Hopper (sm90)."""
