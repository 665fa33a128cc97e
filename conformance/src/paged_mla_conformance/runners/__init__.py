"""Backends and runners around another one: they forward, check, translate, interleave or record."""
