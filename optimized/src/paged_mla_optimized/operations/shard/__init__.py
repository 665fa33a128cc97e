"""The step of one rank of a divided cache."""
