"""Arguments of the API: steps, caches and weights, with their checks."""
