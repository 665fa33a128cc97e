"""Where SGLang 0.5.17 and 0.5.23 differ, as far as these classes meet it. One source serves both.

=============================================  =======================  ===========================
what                                           0.5.17                   0.5.23
=============================================  =======================  ===========================
a pool that moves tokens about                 its allocator's          ``kv_index_translator`` of
                                               ``translate_kv_loc``     the runner
what makes a draft's backend                   returns a backend        returns a name and a backend
the pool's own writer and slot 0               writes it                leaves it out, as ours does
=============================================  =======================  ===========================

The surfaces of both are recorded in ``optimized/tests/engines/sglang_surfaces``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

RECORDED = ("0.5.17", "0.5.23")
"""Releases whose surface the tests hold these classes against."""

_OLDEST = (0, 5, 17)


def serves(version: str) -> bool:
    """Return whether a release of SGLang is one that these classes may be given to."""
    found = [part.split("+")[0] for part in version.split(".")[:3]]
    return not all(part.isdigit() for part in found) or tuple(map(int, found)) >= _OLDEST


def moves_tokens(runner: Any) -> bool:
    """Return whether the map of requests to tokens holds other numbers than slots."""
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None:
        return bool(translator.reads_are_translated)
    return getattr(runner.token_to_kv_pool_allocator, "translate_kv_loc", None) is not None


def made(create_backend: Callable[..., Any], name: str, backend: Any) -> Any:
    """Return a draft's backend in the form that ``_create_backend`` takes from its table."""
    is_named = "stamps_children" in inspect.signature(create_backend).parameters
    return (name, backend) if is_named else backend
