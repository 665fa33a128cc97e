"""Comparison of results with the rules: error budgets, mismatches and their places."""
