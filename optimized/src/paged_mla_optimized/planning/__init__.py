"""Decisions about a step before its kernels start."""
