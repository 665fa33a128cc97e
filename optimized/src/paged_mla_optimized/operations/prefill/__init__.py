"""Attention to materialized keys and values."""
