"""Attention in materialized heads."""
