"""Illegal inputs; each differs from a legal input as little as possible."""
