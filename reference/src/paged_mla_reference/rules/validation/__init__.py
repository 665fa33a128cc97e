"""Checks that raise an error for every input that the rules forbid."""
