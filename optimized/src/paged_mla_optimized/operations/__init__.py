"""One folder for each operation: its launches, and how its kernels are compiled."""
