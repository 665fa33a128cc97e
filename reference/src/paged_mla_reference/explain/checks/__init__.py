"""Checks of a dump: what it lacks, the first rule that it breaks, and where."""
