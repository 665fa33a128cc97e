"""Factories of the backend in every mode in which engines use it, and on portable kernels.

:func:`paged_mla_optimized.backend.create` is the plain mode: eager, block tables, natural lse.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_mla_optimized.backend import TritonBackend, create
from paged_mla_optimized.backend.compiled import CompiledRunner
from paged_mla_optimized.backend.graphed import GraphedRunner
from paged_mla_optimized.backend.mapped import MappedRunner
from paged_mla_optimized.backend.portable import PortableRunner
from paged_mla_shared.backend import OPERATIONS
from paged_mla_shared.errors import Unsupported

_LAYER = frozenset({"layer"})
_OWN_PLANS = _LAYER | {"prefill"}
"""Operations that plan on their own, so that no mode of a step's plan applies to them.

The batch-invariant modes include prefill: the bits of its rows never depend on other rows.
"""


def batch_invariant() -> TritonBackend:
    """Return the backend whose rows have the same bits in every step (S-20)."""
    return _mode("batch_invariant", left_out=_LAYER, settings={"batch_invariant": True})


def portable() -> TritonBackend:
    """Return the backend on the portable kernels, batch-invariant, with their own tiles."""
    settings = {"batch_invariant": True}
    return _mode("portable", runner=PortableRunner, left_out=_LAYER, settings=settings)


def graphed() -> TritonBackend:
    """Return the backend that replays steps from CUDA graphs (S-17).

    Raises
    ------
    Unsupported
        There is no CUDA device, or Triton's interpreter is active.
    """
    # Illegal steps ("bounded") are left out: buckets are larger than their steps, so a row that is
    # longer than the step's tokens, or a mask that is too short, continues inside the bucket.
    recorded = {"plan", "append", "attend", "merge"}
    left_out = frozenset(OPERATIONS) - recorded | {"bounded"}
    backend = _mode("graphed", runner=GraphedRunner, left_out=left_out)
    if backend.mode != "gpu":
        raise Unsupported(
            f"CUDA graphs on {backend.device} are not supported; "
            "use a CUDA device without TRITON_INTERPRET=1"
        )
    return backend


def compiled() -> TritonBackend:
    """Return the backend under ``torch.compile``."""
    return _mode("compiled", runner=CompiledRunner)


def request_map() -> TritonBackend:
    """Return the backend that builds its block tables from a map of requests to slots."""
    return _mode("request_map", runner=MappedRunner, settings={"table_multiple": 8})


def reserved_slot() -> TritonBackend:
    """Return the backend that never writes slot 0, for profiles whose padding uses that slot."""
    return _mode("reserved_slot", settings={"reserved_slot": 0})


def base_2() -> TritonBackend:
    """Return the backend with lse in base 2, without merge, which needs natural logarithms."""
    return _mode("base_2", settings={"lse_base": "2"}, left_out=_OWN_PLANS | {"merge"})


def fast() -> TritonBackend:
    """Return the backend that may round queries and weights to FP8 for FP8 caches."""
    return _mode("fast", settings={"products": "fast"})


def unchecked() -> TritonBackend:
    """Return the backend as engines use it: values are not checked before a step is planned."""
    return _mode("unchecked", left_out=frozenset(), checks_values=False)


def _mode(name: str, *, left_out: frozenset[str] = _OWN_PLANS, **changes: Any) -> TritonBackend:
    """Return the plain backend with changes for a mode."""
    plain = create()
    return replace(plain, name=f"{plain.name} {name}", left_out=left_out, **changes)
