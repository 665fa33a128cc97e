"""Seeded inputs of steps, with poison in all places that no rule allows to be read.

Blocks are shuffled, padded tokens contain NaN, unused table entries contain invalid block ids or
blocks of other rows, and the gaps of views are poisoned. The same case, dims and dtype give the
same bits on every machine.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.cases.case import Case, Row, SlotOrder, TableTail, Tree
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import bits, numpy_dtype
from paged_mla_shared.problem import Batch, Mask, Problem, cu_seqlens_of
from paged_mla_shared.strides import strided

INT32_MAX = 2**31 - 1

Scale = float | NDArray[np.float64]  # one factor, or a factor for each number


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a case, before any rule is applied.

    Parameters
    ----------
    problem : Problem
    batch : Batch
        Its tree mask is in QLEN layout, independent of the problem's ``mask_spelling``.
    context_ckv : dtype [K, R]
        The latents cached before the step, row after row; K is the sum of context lengths.
    context_k_pe : dtype [K, P]
        The rotated keys cached before the step.
    packed_padding : int
    powers_of_two, strided_inputs : bool
        As in the case.
    """

    problem: Problem
    batch: Batch
    context_ckv: NDArray[Any]
    context_k_pe: NDArray[Any]
    packed_padding: int = 0
    powers_of_two: bool = False
    strided_inputs: bool = False


def build_steps(case: Case, dims: MlaDims, dtype: str) -> list[Step]:
    """Return the steps of `case` at `dims` in element type `dtype`."""
    problem = case.problem(dims, dtype)
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    return [_build_step(case, problem, rows, rng) for rows in case.steps]


def _build_step(
    case: Case, problem: Problem, rows: tuple[Row, ...], rng: np.random.Generator
) -> Step:
    dims, dtype = problem.dims, problem.dtype
    query_lens = np.array([row.query_len for row in rows], np.int64)
    live_tokens = int(query_lens.sum())
    tokens = live_tokens + case.padded_tokens
    context_ckv, context_k_pe = _contexts(case, problem, rows, rng)

    real = np.zeros(tokens, bool)  # tokens that a rule allows to be read
    real[:live_tokens] = np.repeat([row.seq_len > 0 for row in rows], query_lens)

    def laid(values: NDArray[Any]) -> NDArray[Any]:
        return strided(values) if case.strided_inputs else values

    def tensor(*inner: int, scale: Scale = 1.0) -> NDArray[Any]:
        values = normal(rng, (tokens, *inner), dtype, scale)
        values[~real] = np.nan
        return laid(values)

    table = _block_table(case, problem, rows, rng)
    q_nope = tensor(dims.num_heads, dims.kv_lora_rank, scale=case.query_scale)
    q_pe = tensor(dims.num_heads, dims.qk_rope_head_dim, scale=case.query_scale)
    latent_scale, key_scale = _magnitudes(case, dims, rng, tokens)
    ckv = tensor(dims.kv_lora_rank, scale=latent_scale)
    k_pe = tensor(dims.qk_rope_head_dim, scale=key_scale)
    if case.coarse:
        for values in (context_ckv, context_k_pe, ckv, k_pe):
            values[...] = values.astype(numpy_dtype("bfloat16"))
    if case.equal_keys:
        _repeat_keys((ckv, k_pe), (context_ckv, context_k_pe), rows)
    if case.odd_values:
        put_odd_values(ckv)
        put_odd_values(k_pe)
    mask = _trees(case.tree, query_lens, rng) if case.mask is Mask.TREE else None
    slots = _slots(case, problem, table, rows, tokens, rng=rng)
    cu_seqlens_q = cu_seqlens_of(query_lens)
    batch = Batch(
        cu_seqlens_q=laid(cu_seqlens_q),
        seq_lens=laid(np.array([row.seq_len for row in rows], np.int32)),
        block_table=laid(table),
        q_nope=q_nope,
        q_pe=q_pe,
        ckv=ckv,
        k_pe=k_pe,
        mask=mask,
        slot_mapping=None if slots is None else laid(slots),
    )
    return Step(
        problem=problem,
        batch=batch,
        context_ckv=context_ckv,
        context_k_pe=context_k_pe,
        packed_padding=case.packed_padding,
        powers_of_two=case.powers_of_two,
        strided_inputs=case.strided_inputs,
    )


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: Scale = 1.0
) -> NDArray[Any]:
    """Return normally distributed numbers times `scale`, drawn in float32 for every dtype."""
    values = rng.standard_normal(shape, dtype=np.float32) * np.asarray(scale, np.float32)
    return values.astype(numpy_dtype(dtype))


def _repeat_keys(
    step: tuple[NDArray[Any], NDArray[Any]],
    contexts: tuple[NDArray[Any], NDArray[Any]],
    rows: tuple[Row, ...],
) -> None:
    """Set the keys of all tokens of a row, also of cached ones, to that of its first new token."""
    own = cached = 0
    for row in rows:
        for new, old in zip(step, contexts, strict=True):
            new[own : own + row.query_len] = new[own : own + 1]
            old[cached : cached + row.context_len] = new[own : own + 1]
        own, cached = own + row.query_len, cached + row.context_len


def put_odd_values(values: NDArray[Any]) -> None:
    """Set most places of `values` [T, width] to -0.0, a subnormal, infinity or signaling NaN."""
    whole = bits(values)
    sign = 1 << (8 * values.itemsize - 1)
    infinity = int(bits(np.array([np.inf], values.dtype))[0])
    odd = [sign, infinity + 1, sign | 1, infinity, infinity + 1 | sign]  # -0.0, signaling NaN, ..
    place = np.add.outer(np.arange(len(values)), np.arange(values.shape[1])) % 7
    for number, pattern in enumerate(odd):
        whole[place == number] = pattern


def _magnitudes(
    case: Case, dims: MlaDims, rng: np.random.Generator, tokens: int
) -> tuple[Scale, Scale]:
    """Return the factors of the latents and of the keys of `tokens` tokens."""
    latents: Scale = case.latent_scale
    keys: Scale = case.key_scale
    width = dims.kv_lora_rank // 4
    if case.uneven:
        factors = np.exp2(rng.uniform(-4, 4, (tokens, 5)))
        latents = latents * np.repeat(factors[:, :4], width, axis=1)
        keys = keys * factors[:, 4:]
    if case.quarters:
        latents = latents * np.repeat(case.quarters, width)
    if case.token_scales:
        tokenwise = np.resize(case.token_scales, (tokens, 1))
        latents, keys = latents * tokenwise, keys * tokenwise
    return latents, keys


def _contexts(
    case: Case, problem: Problem, rows: tuple[Row, ...], rng: np.random.Generator
) -> tuple[NDArray[Any], NDArray[Any]]:
    dims, dtype = problem.dims, problem.dtype
    ckv: list[NDArray[Any]] = []
    k_pe: list[NDArray[Any]] = []
    for row in rows:
        scales = _magnitudes(case, dims, rng, row.context_len)
        ckv.append(normal(rng, (row.context_len, dims.kv_lora_rank), dtype, scales[0]))
        k_pe.append(normal(rng, (row.context_len, dims.qk_rope_head_dim), dtype, scales[1]))
        if row.shares_prefix_of is not None:
            shared = _shared_blocks(row, rows, problem.block_size) * problem.block_size
            ckv[-1][:shared] = ckv[row.shares_prefix_of][:shared]
            k_pe[-1][:shared] = k_pe[row.shares_prefix_of][:shared]
    if not rows:
        return (
            normal(rng, (0, dims.kv_lora_rank), dtype),
            normal(rng, (0, dims.qk_rope_head_dim), dtype),
        )
    return np.concatenate(ckv), np.concatenate(k_pe)


def _shared_blocks(row: Row, rows: tuple[Row, ...], block_size: int) -> int:
    """Return the number of leading blocks that are full of context in both rows."""
    assert row.shares_prefix_of is not None
    return min(row.context_len, rows[row.shares_prefix_of].context_len) // block_size


def _block_table(
    case: Case, problem: Problem, rows: tuple[Row, ...], rng: np.random.Generator
) -> NDArray[np.int32]:
    counts = [-(-row.seq_len // problem.block_size) for row in rows]
    pool = problem.num_blocks
    if case.placed_high:
        free = np.arange(pool - sum(counts), pool)
        free = rng.permutation(free)
    else:
        free = rng.permutation(pool)
    width = max(counts, default=0) + case.table_width
    table = np.full((len(rows), width), -1, np.int64)
    for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
        shared = 0
        if row.shares_prefix_of is not None:
            shared = _shared_blocks(row, rows, problem.block_size)
            table[b, :shared] = table[row.shares_prefix_of, :shared]
        table[b, shared:count], free = free[: count - shared], free[count - shared :]
    tail = np.arange(width)[None, :] >= np.array(counts, np.int64)[:, None]
    live = table[~tail]
    if case.table_tail is TableTail.INT32_MAX:
        table[tail] = INT32_MAX
    elif case.table_tail is TableTail.ZERO:
        table[tail] = 0
    elif case.table_tail is TableTail.FOREIGN and live.size:
        table[tail] = rng.choice(live, int(tail.sum()))
    return table.astype(np.int32)


def _slots(
    case: Case,
    problem: Problem,
    table: NDArray[np.int32],
    rows: tuple[Row, ...],
    tokens: int,
    *,
    rng: np.random.Generator,
) -> NDArray[np.int64] | None:
    """Return distinct slots of live blocks in the case's order; ``None`` without explicit slots."""
    if not case.explicit_slots:
        return None
    mapping = np.full(tokens, -1, np.int64)
    if case.slot_order in {SlotOrder.TABLE, SlotOrder.PERMUTED}:
        own = [_own_slots(table[b], row, problem.block_size) for b, row in enumerate(rows)]
        named = np.concatenate([np.zeros(0, np.int64), *own])
        if case.slot_order is SlotOrder.PERMUTED:
            named = rng.permutation(named)
        mapping[: len(named)] = named
        return mapping
    counts = [-(-row.seq_len // problem.block_size) for row in rows]
    used = [table[b, :n] for b, n in enumerate(counts)]
    live = np.concatenate([np.zeros(0, np.int64), *used])
    _, first = np.unique(live, return_index=True)
    live = live[np.sort(first)]  # shared blocks only once
    slots = problem.layout.slots(live).ravel()
    if case.slot_order is SlotOrder.NONE:
        return mapping
    if case.slot_order is not SlotOrder.SHUFFLED:
        middle = min(tokens, len(slots)) // 2
        if case.slot_order is SlotOrder.DESCENDING:
            slots = slots[::-1]
        elif middle:
            slots[[middle - 1, middle]] = slots[[middle, middle - 1]]
        mapping[: len(slots)] = slots[:tokens]
        return mapping
    chosen = rng.permutation(slots)[:tokens]
    mapping[: len(chosen)] = chosen
    mapping[2::3] = -1
    return mapping


def _own_slots(blocks: NDArray[np.int32], row: Row, block_size: int) -> NDArray[np.int64]:
    """Return the slots of a row's new tokens by its table; -1 for tokens without a position."""
    keys = np.arange(row.context_len, row.seq_len)
    slots = np.full(row.query_len, -1, np.int64)
    own = blocks[keys // block_size].astype(np.int64) * block_size + keys % block_size
    slots[row.query_len - len(keys) :] = own
    return slots


def _trees(
    shape: Tree, query_lens: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Return each row's ancestor-or-self matrix, flattened and concatenated (QLEN spelling)."""
    flat: list[NDArray[np.bool_]] = []
    for nodes in query_lens:
        sees = np.eye(int(nodes), dtype=bool)
        for node in range(1, int(nodes)):
            if shape is Tree.RANDOM:
                parent = int(rng.integers(0, node))
            elif shape is Tree.FOREST:
                parent = node - 3  # three roots
            else:
                parent = node - 1 if shape is Tree.CHAIN else 0
            if parent >= 0:
                sees[node] |= sees[parent]
        flat.append(sees.ravel())
    return np.concatenate(flat) if flat else np.zeros(0, bool)
