"""Illegal layers, partial results and query scales, each with the argument that is wrong.

Layers are also tested with the illegal steps of
:mod:`paged_mla_conformance.suite.bad_inputs.steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paged_mla_conformance.suite.bad_inputs.steps import Bad, put
from paged_mla_shared.cases import MERGES
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.problem import Output

[GOOD_PARTIALS] = [case for case in MERGES if case.name == "eight"]


BadLayer = Bad[LayerBatch]
BadPartials = Bad[list[Output]]


def _weights(name: str, change: Callable[[Any], Any]) -> BadLayer:
    return BadLayer(
        f"weights-{name}",
        "kv_b_proj",
        lambda batch: replace(batch, kv_b_proj=change(batch.kv_b_proj)),
    )


def _rows(name: str, more: int, base: str = "causal") -> BadLayer:
    """Return a layer with `more` absorbed rows in addition to the rows of the step."""
    return BadLayer(
        f"absorbed-{name}",
        "absorbed_rows",
        lambda batch: replace(batch, absorbed_rows=batch.step.num_rows + more),
        base,
    )


BAD_LAYERS = (
    BadLayer("workspace", "workspace", lambda batch: replace(batch, workspace=batch.workspace - 1)),
    _weights("dtype", lambda a: a.astype(np.float64)),
    _weights("lines", lambda a: a[:-1]),
    _weights("rank", lambda a: a[:, :-1]),
    _weights("axes", lambda a: a[None]),
    _rows("negative", -4),
    _rows("past-the-last", 1),
    *(_rows(f"but-one-{base}", -1, base) for base in ("non_causal", "qlen")),
    *(_rows(f"none-{base}", -3, base) for base in ("non_causal", "qlen")),
)


def _partial(name: str, argument: str, change: Callable[[Any], Any], says: str = "") -> BadPartials:
    """Return partial results; one array of the last is changed, and the error may name `says`."""

    def spoil(partials: list[Output]) -> list[Output]:
        last = replace(partials[-1], **{argument: change(getattr(partials[-1], argument))})
        return [*partials[:-1], last]

    return BadPartials(f"{argument}-{name}", says or argument, spoil)


BAD_PARTIALS = (
    BadPartials("none", "partials", lambda _: []),
    _partial("dtype", "out", lambda a: a.astype(np.float64)),
    _partial("tokens", "out", lambda a: a[:-1], "out|lse"),
    _partial("width", "out", lambda a: a[..., :-1]),
    _partial("axes", "out", lambda a: a[:, 0], "out|lse"),
    _partial("dtype", "lse", lambda a: a.astype(np.float64)),
    _partial("heads", "lse", lambda a: a[:, :-1]),
    _partial("nan", "lse", put((0, 0), np.nan)),
    _partial("inf", "lse", put((0, 0), np.inf)),
)

BAD_QUERY_SCALES = (0.0, -1.0, float("nan"), float("inf"), 1e-60)
