"""The tests of the suite, one module for each group of cases."""
