"""Faults that may explain a broken rule, ranked by the errors that they do not explain."""
