"""Executable specification of paged MLA attention: the rules S-1 to S-22, in NumPy.

Every module states one group of rules and is written to be read beside it. Arithmetic is
float64; results are rounded only where a rule says so, and only by
:func:`paged_mla_reference.rules.rounding.round_to`.
"""
