"""Inputs that no rule allows, each the smallest change to a good one."""
