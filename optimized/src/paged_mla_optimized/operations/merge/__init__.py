"""Merges of partial answers."""
