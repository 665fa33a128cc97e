"""Factories that return no backend, or a backend with an invalid declaration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_mla_conformance.meta.mutants.backends import FLOAT32, MutantBackend


def _exit() -> None:
    raise SystemExit(0)


def _raise() -> None:
    raise RuntimeError("no driver")


def _backend(**fields: Any) -> Callable[[], MutantBackend]:
    return lambda: MutantBackend(**fields)


def _declaring(**fields: Any) -> Callable[[], MutantBackend]:
    return lambda: MutantBackend(capabilities=replace(FLOAT32, **fields))


def _bounded_in_name() -> Any:
    backend = MutantBackend()
    names = ("name", "version", "mode", "device", "memory_bytes", "capabilities", "prepare")
    return SimpleNamespace(**{name: getattr(backend, name) for name in names})


_FACTORIES: dict[str, Any] = {
    "no-callable": 3,
    "no-backend": lambda: None,
    "a-string": lambda: "backend",
    "exits": _exit,
    "skips": lambda: pytest.skip("not today"),
    "raises": _raise,
    "strange-mode": _backend(mode="tpu"),
    "version-of-numbers": _backend(version=1.0),
    "no-capabilities": _backend(capabilities={"ops": ["attend"]}),
    "ops-in-a-list": _declaring(ops=["attend"]),
    "strange-op": _declaring(ops=frozenset({"attend", "atend"})),
    "strange-feature": _declaring(features=frozenset({"paddings"})),
    "strange-mask": _declaring(masks=frozenset({"causal", "tree"})),
    "strange-dtype": _declaring(dtypes=frozenset({"fp32"})),
    "no-dtype": _declaring(dtypes=frozenset()),
    "sizes-in-words": _declaring(block_sizes=frozenset({"64"})),
    "only-huge-blocks": _declaring(block_sizes=frozenset({131072})),
    "sizes-of-numpy": _declaring(num_heads=frozenset(np.arange(1, 3))),
    "flat-head-dims": _declaring(head_dims=frozenset({32, 16})),
    "flat-prefill-dims": _declaring(prefill_dims=frozenset({(128, 64)})),
    "bounded-in-name": _bounded_in_name,
    "endless-queries": _declaring(max_query_len=float("inf")),
}


def __getattr__(name: str) -> Any:
    """Return a factory by its name."""
    if name not in _FACTORIES:
        raise AttributeError(name)
    return _FACTORIES[name]
