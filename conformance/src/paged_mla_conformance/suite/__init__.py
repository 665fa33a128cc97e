"""The tests, one module per group of cases."""
