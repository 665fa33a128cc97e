"""Explain a dump: find the first broken rule, its place, and the known bugs that match it."""
