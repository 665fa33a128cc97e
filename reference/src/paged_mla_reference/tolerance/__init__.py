"""Holding an answer against the rules: what it may cost, what is wrong, and where."""
