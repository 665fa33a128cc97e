"""Attention in Gluon, for Hopper."""
