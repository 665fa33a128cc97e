"""Backends and runners that wrap another one: they check, translate, interleave or record calls."""
