"""What is decided of a step before its kernels start."""
