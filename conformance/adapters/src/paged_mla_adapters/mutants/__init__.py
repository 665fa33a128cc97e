"""Careless kernels: mutants whose faults only the surroundings of their calls find.

``python -m paged_mla_adapters.mutants`` runs a step on each; :mod:`.careless` has the list.
"""
