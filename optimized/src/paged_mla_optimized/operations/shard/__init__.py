"""A step of one rank."""
