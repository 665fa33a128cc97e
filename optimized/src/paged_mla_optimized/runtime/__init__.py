"""The device, Triton, and the log."""
