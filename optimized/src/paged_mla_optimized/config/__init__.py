"""Configurations, their limits, and checks of single arguments."""
