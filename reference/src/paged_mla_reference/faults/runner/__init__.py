"""Faults of runners: each wraps a right runner and changes some of its methods."""
