"""Measure how often explanations are right: on mutants, on single faults and on right steps."""
