"""What callers hand over: steps, caches and weights, and the checks of each."""
