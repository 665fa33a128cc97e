"""Merges of partial results."""
