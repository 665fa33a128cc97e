"""Attention in Triton, for every architecture."""
