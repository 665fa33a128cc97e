"""Report which kernel serves a step, and why; this module needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from paged_mla_optimized.planning.families import PORTABLE, Demand, passed_over, serving_variant

RULE = (
    "The longest query of a step (max_query_len of MlaStep) decides: "
    "of the kernels that fit its pairs of token and head, the fastest serves."
)
"""The rule of kernel selection; the number of rows does not matter."""


def served_by(demand: Demand, query_len: int) -> str:
    """Return the name of the kernel for steps whose longest query has `query_len` tokens."""
    family = serving_variant(demand, query_len).family
    return "portable Triton kernel" if family == PORTABLE else f"Gluon kernel {family}"


def reasons_against(demand: Demand, query_lens: Iterable[int]) -> list[str]:
    """Return why faster kernels do not serve steps of these query lengths, each reason once."""
    kernels: dict[str, dict[str, None]] = {}
    for query_len in query_lens:
        for name, reason in passed_over(demand, query_len).items():
            kernels.setdefault(reason, {})[name] = None
    return [f"not {', '.join(names)}: {reason}" for reason, names in kernels.items()]
