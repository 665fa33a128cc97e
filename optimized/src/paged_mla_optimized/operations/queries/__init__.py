"""Queries on their way to attention: rotated and quantized."""
