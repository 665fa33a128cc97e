"""Illegal problems and steps with the wrong argument; each differs little from a legal one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from paged_mla_reference.rules.masks import spell_mask
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Problem, Rope, RopePairing, Yarn

ROWS = (Row(70, 3), Row(10, 10), Row(5, 1))


def _case(name: str, **more: Any) -> Case:
    why = "a legal step, which is made illegal"
    return Case(group="errors", name=name, why=why, rules=("S-2",), rows=ROWS, num_heads=1, **more)


BASES = {
    "causal": _case("causal"),
    "slots": _case("slots", explicit_slots=True),
    "non_causal": _case("non_causal", mask=Mask.NON_CAUSAL),
    **{s.value: _case(s.value, mask=Mask.TREE, mask_spelling=s) for s in MaskSpelling},
}

_OF_LENGTHS = ("plan", "append", "attend", "quantize_queries", "layer")
_CALLS_TAKING = {
    "seq_lens": (*_OF_LENGTHS, "gather_context"),
    "block_table": ("plan", "append", "attend", "gather_context", "layer"),
    "q_nope": ("attend", "quantize_queries", "layer"),
    "q_pe": ("attend", "quantize_queries", "layer"),
    "mask": ("attend", "layer"),
    "ckv": ("append", "layer"),
    "k_pe": ("append", "layer"),
    "slot_mapping": ("append", "layer"),
}


Input = TypeVar("Input")


@dataclass(frozen=True)
class Bad(Generic[Input]):
    """An illegal input; the error for it must match the pattern `argument`."""

    name: str
    argument: str
    spoil: Callable[[Input], Input]
    base: str = "causal"


BadProblem = Bad[Problem]


@dataclass(frozen=True)
class BadBatch:
    """An illegal batch; every call that takes `argument` must raise an error that names it.

    `argument` is a pattern: if two arguments contradict each other, the error may name either.
    """

    name: str
    argument: str
    spoil: Callable[[Problem, Batch], Batch]
    base: str = "causal"

    @property
    def calls(self) -> tuple[str, ...]:
        """The calls of a runner that take the argument."""
        return _CALLS_TAKING.get(self.argument, _OF_LENGTHS)


def _set(field: str, value: Any) -> Callable[[Problem], Problem]:
    return lambda problem: replace(problem, **{field: value})


def _dims(field: str, value: int) -> Callable[[Problem], Problem]:
    return lambda problem: replace(problem, dims=replace(problem.dims, **{field: value}))


def _other_format(problem: Problem) -> Problem:
    return replace(problem, cache_format="fp32" if problem.dtype != "float32" else "fp16")


def put(index: Any, value: Any) -> Callable[[Any], Any]:
    """Return a function that copies an array and sets an element of the copy."""

    def change(array: Any) -> Any:
        array = array.copy()
        array[index] = value
        return array

    return change


def _array(field: str, change: Callable[[Any], Any]) -> Callable[[Problem, Batch], Batch]:
    return lambda _, batch: replace(batch, **{field: change(getattr(batch, field))})


def _element(field: str, index: Any, value: int) -> Callable[[Problem, Batch], Batch]:
    return _array(field, put(index, value))


def _cast(field: str, dtype: Any) -> Callable[[Problem, Batch], Batch]:
    return _array(field, lambda array: array.astype(dtype))


def _again(field: str, index: Any, source: Any) -> Callable[[Problem, Batch], Batch]:
    """Return a function that copies the element at `source` to `index`."""
    return _array(field, lambda array: put(index, array[source])(array))


def _past_the_cache(problem: Problem, batch: Batch) -> Batch:
    return _element("block_table", (0, 1), problem.num_blocks)(problem, batch)


def _slot_past_the_cache(problem: Problem, batch: Batch) -> Batch:
    slots = problem.num_blocks * problem.block_size
    return _element("slot_mapping", 0, slots)(problem, batch)


def _slot_of_a_block_of_two_rows(problem: Problem, batch: Batch) -> Batch:
    table = batch.block_table.copy()
    table[2, 0] = table[0, 1]
    slots = np.full(batch.num_tokens, -1, np.int64)
    slots[0] = int(table[0, 1]) * problem.block_size
    return replace(batch, block_table=table, slot_mapping=slots)


def _mask_bits(first: int, *, packed: bool = False) -> Callable[[Problem, Batch], Batch]:
    """Return a function that sets the mask of the first node.

    The node sees itself if bit 0 of `first` is set, and the next node if bit 1 is set.
    """

    def spoil(problem: Problem, batch: Batch) -> Batch:
        assert batch.mask is not None
        mask = batch.mask.copy()
        if packed:
            mask[0, 0] = mask[0, 0] & 0xFC | first
        else:
            own = 67 if problem.mask_spelling is MaskSpelling.FULL else 0  # after the context
            mask[own : own + 2] = first & 1, first >> 1
        return replace(batch, mask=mask)

    return spoil


def _a_node_too_many(problem: Problem, batch: Batch) -> Batch:
    """Return the batch with nodes of row 1 moved to row 0, which then has one node too many."""
    longest = problem.max_draft_tokens + 1
    ends = np.array([0, longest, batch.num_tokens - 1, batch.num_tokens], np.int32)
    matrices = [np.tri(n, dtype=bool) for n in np.diff(ends)]
    lines = spell_mask(
        matrices, problem.mask_spelling, batch.seq_lens, problem.max_draft_tokens, batch.num_tokens
    )
    return replace(batch, cu_seqlens_q=ends, mask=lines)


def _with_mask(_: Problem, batch: Batch) -> Batch:
    return replace(batch, mask=np.ones(4, bool))


def _without_mask(_: Problem, batch: Batch) -> Batch:
    return replace(batch, mask=None)


BAD_PROBLEMS = (
    BadProblem("scale-nan", "softmax_scale", _set("softmax_scale", float("nan"))),
    BadProblem("scale-inf", "softmax_scale", _set("softmax_scale", float("inf"))),
    BadProblem("scale-zero", "softmax_scale", _set("softmax_scale", 0.0)),
    BadProblem("scale-negative", "softmax_scale", _set("softmax_scale", -0.1)),
    BadProblem("block-size-zero", "block_size", _set("block_size", 0)),
    BadProblem("block-size-negative", "block_size", _set("block_size", -64)),
    BadProblem("no-blocks", "num_blocks", _set("num_blocks", 0)),
    BadProblem("no-heads", "num_heads", _dims("num_heads", 0)),
    BadProblem("odd-rope", "qk_rope_head_dim", _dims("qk_rope_head_dim", 15)),
    BadProblem("no-rank", "kv_lora_rank", _dims("kv_lora_rank", 0)),
    BadProblem("strange-rank", "kv_lora_rank", _dims("kv_lora_rank", 40)),
    BadProblem("unknown-dtype", "dtype", _set("dtype", "int8")),
    BadProblem("unknown-format", "cache_format", _set("cache_format", "int4")),
    BadProblem("format-of-other-dtype", "cache_format", _other_format),
    BadProblem("no-rows", "max_rows", _set("max_rows", 0)),
    BadProblem("no-tokens", "max_query_tokens", _set("max_query_tokens", 0)),
    BadProblem("no-length", "max_model_len", _set("max_model_len", 0)),
    BadProblem("negative-padding", "token_padding", _set("token_padding", -4)),
    BadProblem("ragged-padding", "block_padding", _set("block_padding", 1)),
    BadProblem("drafts", "max_draft_tokens", _set("max_draft_tokens", -1), base="qlen"),
    BadProblem("drafts-without-tree", "max_draft_tokens", _set("max_draft_tokens", 4)),
    *(
        BadProblem(f"cache-scale-{name}", "cache_scale", _set("cache_scale", scale))
        for name, scale in (
            ("nan", float("nan")),
            ("inf", float("inf")),
            ("zero", 0.0),
            ("negative", -1.0),
            ("below-float32", 1e-60),
        )
    ),
    BadProblem(
        "group-of-no-whole-tokens",
        "block_size|cache_format",  # cache_format if the backend does not declare the format
        lambda problem: replace(problem, cache_format="fp8_block_group", block_size=6),
    ),
    BadProblem("theta", "rope", _set("rope", Rope(RopePairing.NEOX, theta=0.0))),
    BadProblem("theta-inf", "rope", _set("rope", Rope(RopePairing.NEOX, theta=float("inf")))),
    BadProblem("pairing", "rope", _set("rope", Rope("gptj"))),  # type: ignore[arg-type]
    *(
        BadProblem(f"yarn-{name}", "rope", _set("rope", Rope(RopePairing.NEOX, theta, yarn)))
        for name, theta, yarn in (
            ("factor", 1e4, Yarn(-1.0, 4096)),
            ("factor-nan", 1e4, Yarn(float("nan"), 4096)),
            ("original-length", 1e4, Yarn(40.0, 0)),
            ("beta-fast", 1e4, Yarn(40.0, 4096, beta_fast=0.0)),
            ("beta-slow", 1e4, Yarn(40.0, 4096, beta_slow=float("inf"))),
            ("mscale", 1e4, Yarn(40.0, 4096, mscale=-1.0)),
            ("mscale-all-dim", 1e4, Yarn(40.0, 4096, mscale_all_dim=float("inf"))),
            ("theta-1", 1.0, Yarn(40.0, 4096)),
            ("factor-tiny", 1e4, Yarn(1e-320, 4096)),
            ("beta-slow-tiny", 1e4, Yarn(40.0, 4096, beta_slow=1e-320)),
            ("betas-exchanged", 1e4, Yarn(40.0, 4096, beta_fast=1.0, beta_slow=32.0)),
        )
    ),
)

BAD_BATCHES = (
    BadBatch("lens-int64", "seq_lens", _cast("seq_lens", np.int64)),
    BadBatch("lens-2d", "seq_lens", _array("seq_lens", lambda a: a[:, None])),
    BadBatch("lens-short", "seq_lens|cu_seqlens_q", _array("seq_lens", lambda a: a[:2])),
    BadBatch("lens-negative", "seq_lens", _element("seq_lens", 0, -1)),
    BadBatch("lens-past-capacity", "seq_lens", _element("seq_lens", 0, 71)),
    BadBatch("lens-below-query", "seq_lens", _element("seq_lens", 1, 9)),
    *(
        BadBatch(f"lens-below-query-{s}", "seq_lens", _element("seq_lens", 1, 9), base=s.value)
        for s in MaskSpelling
    ),
    BadBatch("cu-int64", "cu_seqlens_q", _cast("cu_seqlens_q", np.int64)),
    BadBatch("cu-empty", "cu_seqlens_q", _array("cu_seqlens_q", lambda a: a[:0])),
    BadBatch("cu-not-from-0", "cu_seqlens_q", _element("cu_seqlens_q", 0, 1)),
    BadBatch("cu-decreasing", "cu_seqlens_q", _element("cu_seqlens_q", 1, 14)),
    BadBatch("cu-past-tokens", "cu_seqlens_q", _element("cu_seqlens_q", 3, 15)),
    BadBatch("table-int64", "block_table", _cast("block_table", np.int64)),
    BadBatch("table-1d", "block_table", _array("block_table", lambda a: a[0])),
    BadBatch("table-fewer-rows", "block_table", _array("block_table", lambda a: a[:2])),
    BadBatch("table-narrow", "block_table", _array("block_table", lambda a: a[:, :1])),
    BadBatch("table-negative", "block_table", _element("block_table", (0, 1), -1)),
    BadBatch("table-past-cache", "block_table", _past_the_cache),
    BadBatch("table-write-overlap", "block_table", _again("block_table", (2, 0), (1, 0))),
    BadBatch(
        "table-written-and-read",
        "block_table",
        _again("block_table", (1, 0), (0, 0)),  # a block that is full of row 0's context
    ),
    BadBatch("table-block-twice", "block_table", _again("block_table", (0, 1), (0, 0))),
    BadBatch("q-nope-dtype", "q_nope", _cast("q_nope", np.float64)),
    BadBatch("q-nope-heads", "q_nope", _array("q_nope", lambda a: a[:, :-1])),
    BadBatch("q-nope-width", "q_nope", _array("q_nope", lambda a: a[..., :-1])),
    BadBatch("q-pe-dtype", "q_pe", _cast("q_pe", np.float64)),
    BadBatch("q-pe-width", "q_pe", _array("q_pe", lambda a: a[..., :-1])),
    BadBatch("q-pe-tokens", "q_pe", _array("q_pe", lambda a: a[:-1])),
    BadBatch("ckv-dtype", "ckv", _cast("ckv", np.float64)),
    BadBatch("ckv-tokens", "ckv", _array("ckv", lambda a: a[:-1])),
    BadBatch("ckv-width", "ckv", _array("ckv", lambda a: a[:, :-1])),
    BadBatch("k-pe-dtype", "k_pe", _cast("k_pe", np.float64)),
    BadBatch("k-pe-tokens", "k_pe", _array("k_pe", lambda a: a[:-1])),
    BadBatch("slots-int32", "slot_mapping", _cast("slot_mapping", np.int32), base="slots"),
    BadBatch("slots-short", "slot_mapping", _array("slot_mapping", lambda a: a[:-1]), base="slots"),
    BadBatch("slots-below", "slot_mapping", _element("slot_mapping", 0, -2), base="slots"),
    BadBatch("slots-past-cache", "slot_mapping", _slot_past_the_cache, base="slots"),
    BadBatch("slots-repeated", "slot_mapping", _again("slot_mapping", 1, 0), base="slots"),
    BadBatch("slots-of-two-rows", "slot_mapping", _slot_of_a_block_of_two_rows, base="slots"),
    BadBatch("mask-unexpected", "mask", _with_mask),
    BadBatch("mask-missing", "mask", _without_mask, base="qlen"),
    BadBatch("mask-dtype", "mask", _cast("mask", np.float32), base="qlen"),
    BadBatch("mask-short", "mask", _array("mask", lambda a: a[:-1]), base="qlen"),
    *(
        BadBatch(f"mask-{name}", "mask", _mask_bits(bits, packed=base == "packed"), base=base)
        for base, names in (
            ("qlen", ("blind-node", "later-node")),
            ("full", ("full-blind-node", "full-later-node")),
            ("packed", ("packed-blind-node", "packed-later-node")),
        )
        for name, bits in zip(names, (0b00, 0b11), strict=True)
    ),
    *(
        BadBatch(f"drafts-{base}", "max_draft_tokens", _a_node_too_many, base=base)
        for base in ("qlen", "packed")
    ),
    BadBatch("mask-full-short", "mask", _array("mask", lambda a: a[:-1]), base="full"),
    BadBatch(
        "mask-full-context",
        "mask",
        _element("mask", 0, 0),  # row 0 starts with 67 columns of context
        base="full",
    ),
    BadBatch("mask-packed-narrow", "mask", _array("mask", lambda a: a[:, :1]), base="packed"),
    BadBatch("mask-packed-lines", "mask", _array("mask", lambda a: a[:-1]), base="packed"),
)
