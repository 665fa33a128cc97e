"""Faults that may explain a broken rule, ranked by how much stays wrong."""
