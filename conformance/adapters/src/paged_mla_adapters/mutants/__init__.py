"""Careless kernels, which nothing but the surroundings of their calls finds.

``python -m paged_mla_adapters.mutants`` puts each to a step; see :mod:`.careless` for the list.
"""
