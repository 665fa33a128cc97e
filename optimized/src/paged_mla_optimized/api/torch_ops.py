"""The operations as ``torch.library`` ops, whose schemas declare every mutation.

Under ``torch.compile`` the methods of :class:`~paged_mla_optimized.api.paged_mla.PagedMla` become
these ops. A `handle` identifies an instance. Ops exchange data only through tensors in their
schemas (``state`` is the plan), so a compiler sees every dependency. The op of ``merge_partials``
is in the module of that function.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paged_mla_optimized.planning.plan import HostPlan
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep, RequestMap

if TYPE_CHECKING:
    from paged_mla_optimized.api.core import Core

_HANDLES = itertools.count()
_INSTANCES: weakref.WeakValueDictionary[int, Core] = weakref.WeakValueDictionary()


def register(core: Core) -> int:
    """Return the handle that identifies `core` in ops; it is valid as long as `core` exists."""
    handle = next(_HANDLES)
    _INSTANCES[handle] = core
    return handle


@torch.library.custom_op(
    "paged_mla::plan",
    mutates_args={"state"},
    schema="(Tensor(a!) state, Tensor cu_seqlens_q, Tensor seq_lens, Tensor block_table,"
    " Tensor? request_ids, Tensor? mask, *, SymInt num_tokens, SymInt? max_query_len, int handle)"
    " -> ()",
)
def plan(  # noqa: PLR0917 - ops take tensors by position
    state: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    request_ids: Tensor | None,
    mask: Tensor | None,
    *,
    num_tokens: int,
    max_query_len: int | None,
    handle: int,
) -> None:
    """Fill `state`; with `request_ids`, `block_table` is a map from requests to slots."""
    core = _INSTANCES[handle]
    table = block_table if request_ids is None else RequestMap(block_table, request_ids)
    plan = core.plan.on(state)
    step = MlaStep(cu_seqlens_q, seq_lens, table, num_tokens=num_tokens, mask=mask)
    core.fill(plan, step, max_query_len=max_query_len)


@torch.library.custom_op(
    "paged_mla::append",
    mutates_args={"latents", "scales"},
    schema="(Tensor state, Tensor ckv, Tensor k_pe, Tensor(a!) latents, Tensor(b!)? scales,"
    " Tensor? slot_mapping, *, SymInt num_tokens, int handle) -> ()",
)
def append(  # noqa: PLR0917 - ops take tensors by position
    state: Tensor,
    ckv: Tensor,
    k_pe: Tensor,
    latents: Tensor,
    scales: Tensor | None,
    slot_mapping: Tensor | None,
    *,
    num_tokens: int,
    handle: int,
) -> None:
    """Write this step's latents to the cache that `latents` and `scales` form."""
    core = _INSTANCES[handle]
    plan = core.plan.on(state)
    plan.host = plan.host._replace(num_tokens=num_tokens)
    cache = LatentCache(core.config.cache_format, latents, scales)
    core.append(plan, ckv, k_pe, cache, slot_mapping)


@torch.library.custom_op(
    "paged_mla::attend",
    mutates_args={"out", "lse"},
    schema="(Tensor state, Tensor q_nope, Tensor q_pe, Tensor(a!) out, Tensor(b!) lse,"
    " Tensor latents, Tensor? scales, Tensor? block_table,"
    " *, SymInt num_rows, SymInt num_tokens, SymInt? max_query_len, int handle) -> ()",
)
def attend(  # noqa: PLR0917 - ops take tensors by position
    state: Tensor,
    q_nope: Tensor,
    q_pe: Tensor,
    out: Tensor,
    lse: Tensor,
    latents: Tensor,
    scales: Tensor | None,
    block_table: Tensor | None,
    *,
    num_rows: int,
    num_tokens: int,
    max_query_len: int | None,
    handle: int,
) -> None:
    """Write every element of `out` and `lse`; without `block_table`, read the plan's table."""
    core = _INSTANCES[handle]
    plan = core.plan.on(state)
    plan.host = core.chosen(HostPlan(num_rows, num_tokens, max_query_len, given_table=block_table))
    cache = LatentCache(core.config.cache_format, latents, scales)
    core.attend(plan, Queries(q_nope, q_pe), cache, Answer(out, lse))


@torch.library.custom_op("paged_mla::quantize_queries", mutates_args=())
def quantize_queries(
    state: Tensor,
    q_nope: Tensor,
    q_pe: Tensor,
    scale: Tensor | None,
    *,
    num_tokens: int,
    handle: int,
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of the planned step's queries."""
    core = _INSTANCES[handle]
    plan = core.plan.on(state)
    plan.host = plan.host._replace(num_tokens=num_tokens)
    return core.quantize_queries(plan, q_nope, q_pe, scale)


@quantize_queries.register_fake
def _(
    _state: Tensor, q_nope: Tensor, q_pe: Tensor, _scale: Tensor | None, **_rest: object
) -> tuple[Tensor, Tensor]:
    lines, width = q_nope.shape[:2], q_nope.shape[2] + q_pe.shape[2]
    codes = q_nope.new_empty((*lines, width), dtype=torch.float8_e4m3fn)
    return codes, q_nope.new_empty(lines, dtype=torch.float32)


@plan.register_fake
@append.register_fake
@attend.register_fake
def _nothing_returned(*_tensors: Tensor, **_rest: object) -> None:
    pass
