"""Judges a kernel by its call signature: roles of parameters, layouts, what it serves."""
