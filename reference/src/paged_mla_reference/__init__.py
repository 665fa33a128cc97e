"""Executable specification of paged MLA attention: the rules S-1 to S-22, in NumPy.

Every module implements one group of rules; its docstrings state these rules. Arithmetic is
float64. Results are rounded only where a rule requires it, and only by
:func:`paged_mla_reference.rules.rounding.round_to`.
"""
