"""The rules as nine functions, so that one of them can be exchanged for a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import AttendQuery, attend, attend_visible
from paged_mla_reference.rules.cache import append, gather_context
from paged_mla_reference.rules.layer import layer
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.queries import quantise_queries
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem


def answer(problem: Problem, batch: Batch, image: CacheImage) -> Output:
    """Return the answer as a backend gives it, rounded where the rules round."""
    return attend(problem, batch, image, Rounding.SPEC).output(problem.dtype)


def visible_answer(
    problem: Problem,
    batch: Batch,
    image: CacheImage,
    visible: Sequence[NDArray[np.bool_]],
    attend_query: AttendQuery | None = None,
) -> Output:
    """Return :func:`answer` to other keys, or by other arithmetic of a query."""
    found = attend_visible(problem, batch, image, visible, attend_query=attend_query)
    return found.output(problem.dtype)


def prefilled(problem: Problem, batch: PrefillBatch) -> Output:
    """Return a prefill's answer as a backend gives it, rounded where the rules round."""
    return prefill(problem, batch, Rounding.SPEC).output(problem.dtype)


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """What a runner computes, without its cache.

    Parameters
    ----------
    metadata : callable
        (S-1, S-3), :func:`paged_mla_reference.rules.positions.metadata`.
    append : callable
        (S-10, S-12), :func:`paged_mla_reference.rules.cache.append`.
    attend : callable
        (S-4 to S-7), :func:`answer`.
    attend_visible : callable
        (S-5 to S-7), :func:`visible_answer`.
    gather_context : callable
        (S-1, S-9), :func:`paged_mla_reference.rules.cache.gather_context`.
    quantise_queries : callable
        (S-11), :func:`paged_mla_reference.rules.queries.quantise_queries`.
    merge : callable
        (S-8), :func:`paged_mla_reference.rules.merge.merge`.
    prefill : callable
        (S-21), :func:`prefilled`.
    layer : callable
        (S-21), :func:`paged_mla_reference.rules.layer.layer`.
    """

    metadata: Callable[[Problem, Batch], Metadata] = metadata
    append: Callable[[Problem, Batch, CacheImage], CacheImage] = append
    attend: Callable[[Problem, Batch, CacheImage], Output] = answer
    attend_visible: Callable[..., Output] = visible_answer
    gather_context: Callable[[Problem, Batch, CacheImage], tuple[NDArray[Any], NDArray[Any]]] = (
        gather_context
    )
    quantise_queries: Callable[
        [Problem, Batch, float | None], tuple[NDArray[np.uint8], NDArray[np.float32]]
    ] = quantise_queries
    merge: Callable[[Sequence[Output]], Output] = merge
    prefill: Callable[[Problem, PrefillBatch], Output] = prefilled
    layer: Callable[[Problem, LayerBatch, CacheImage], Output] = layer


RIGHT = Oracle()
