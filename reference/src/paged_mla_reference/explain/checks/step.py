"""Turn a dump into the arguments of the rules: a batch, and the cache before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.paging import blocks_of, context_lens, used_blocks
from paged_mla_reference.rules.validation.inputs import (
    validate_batch,
    validate_problem,
    validate_query_scale,
)
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.dump import FIELDS, Dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.poison import poisoned_image
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Mask, Output, Problem

LENGTHS = ("cu_seqlens_q", "seq_lens")
QUERIES = ("q_nope", "q_pe")
LATENTS = ("ckv", "k_pe")
PREFILL = tuple(
    f"prefill_{name}"
    for name in ("cu_seqlens_q", "cu_seqlens_k", "q_nope", "q_pe", "k_nope", "k_pe", "v")
)
LAYER = ("layer_q_nope", "q_pe", "kv_b_proj")
LARGEST_BLOCK = 1 << 28  # bytes
MOST_ENTRIES = 1 << 24  # of a table that replaces a missing one; of tokens without a tensor
_INPUTS = (*LENGTHS, "block_table", *QUERIES, *LATENTS, "mask", "slot_mapping")


@dataclass(frozen=True)
class Step:
    """A recorded step, as far as the dump allows it to be recomputed.

    Parameters
    ----------
    dump : Dump
    problem : Problem
        The dump's problem. Without a block table in the dump, it has at least as many blocks as
        its rows need.
    batch : Batch or None
        Arrays that the dump lacks are placeholders: zeros, or a table of consecutive blocks.
        ``None`` if the dump has no lengths.
    before, after : CacheImage or None
        The cache before and after the step. If the dump lacks `after`, it is computed where
        possible (see `computed`).
    prefill : PrefillBatch or None
        ``None`` unless the dump has all fields of a prefill.
    layer : LayerBatch or None
        The batch with the queries of a whole layer; ``None`` unless the dump has its fields.
    computed : str
        The data from which `after` was computed; "" if the dump has it, or if it is ``None``.
    """

    dump: Dump
    problem: Problem
    batch: Batch | None
    before: CacheImage | None
    after: CacheImage | None
    prefill: PrefillBatch | None = None
    layer: LayerBatch | None = None
    computed: str = ""

    @classmethod
    def of(cls, dump: Dump) -> Step:
        """Return the step of a dump.

        Raises
        ------
        InvalidArgument
            The problem, the query scale or `unlisted` is invalid; a block is too large, listed
            twice or outside the cache; or the dump lacks the table or all tensors of tokens, and
            its lengths need more than ``MOST_ENTRIES``.
        """
        validate_problem(dump.problem)
        validate_query_scale(query_scale(dump))
        problem, batch = dump.problem, None
        if problem.layout.block_bytes > LARGEST_BLOCK:
            given = f"blocks of {problem.layout.block_bytes} bytes"
            raise InvalidArgument("block_size", given, f"at most {LARGEST_BLOCK}")
        if has(dump, *LENGTHS):
            problem, batch = _batch(dump)
        images = _image(dump, "before"), _image(dump, "after")
        step = cls(dump, problem, batch, *images, _prefill(dump), _layer(dump, batch))
        return step if step.after is not None else _with_computed_cache(step)

    def has(self, *names: str) -> bool:
        """Return whether the dump has all these fields."""
        return has(self.dump, *names)

    def array(self, name: str) -> NDArray[Any]:
        """Return a field that the dump has."""
        return self.dump.arrays[name]

    @property
    def planned(self) -> dict[str, str]:
        """The recorded fields of ``Metadata``: the name in the dump, by the name in ``Metadata``.

        The slots are included only if the dump has a block table.
        """
        found = {"positions": ("positions",), "slot_mapping": ("slots", "block_table")}
        return {name: needs[0] for name, needs in found.items() if self.has(*needs)}

    @property
    def lse(self) -> NDArray[np.float32] | None:
        """The dump's lse in nats; ``None`` if the dump has no lse."""
        return self.in_nats("lse")

    @property
    def partials(self) -> list[Output]:
        """The partial results, lse in nats; empty if the dump lacks one of their two fields."""
        lse = self.in_nats("partial_lse")
        if lse is None or not self.has("partial_out"):
            return []
        return [
            Output(out, of_part)
            for out, of_part in zip(self.array("partial_out"), lse, strict=True)
        ]

    def in_nats(self, name: str) -> NDArray[np.float32] | None:
        """Return a field that is an lse, in nats; ``None`` if the dump lacks it."""
        if name not in self.dump.arrays:
            return None
        lse = self.dump.arrays[name]
        if self.dump.lse_base == "2":
            lse = lse * np.float32(math.log(2))
        return lse.astype(np.float32)

    def unlisted_rows(self) -> NDArray[np.int64]:
        """Return the rows whose keys cannot all be read, because the dump lacks one of the blocks.

        If `after` is computed from `before`, blocks with keys of earlier steps must be in `before`.
        Empty without a batch or a cache, or if the dump specifies the bytes of unlisted blocks.
        """
        if self.batch is None or self.after is None or self.has("unlisted"):
            return np.zeros(0, np.int64)
        earlier = self.before if self.computed and self.before is not None else self.after
        size, contexts = self.problem.block_size, context_lens(self.batch)
        lacking = []
        for row in range(self.batch.num_rows):
            used = used_blocks(self.batch, row, size)
            context = used[: blocks_of(int(contexts[row]), size)]
            unlisted = (
                np.setdiff1d(context, earlier.block_ids),
                np.setdiff1d(used, self.after.block_ids),
            )
            if any(blocks.size for blocks in unlisted):
                lacking.append(row)
        return np.array(lacking, np.int64)


def has(dump: Dump, *names: str) -> bool:
    """Return whether a dump has all these fields."""
    return all(name in dump.arrays for name in names)


def query_scale(dump: Dump) -> float | None:
    """Return the scale of all queries; ``None`` if each query has its own scale."""
    scale = dump.arrays.get("query_scale")
    return None if scale is None else float(scale)


def _prefill(dump: Dump) -> PrefillBatch | None:
    if not has(dump, *PREFILL):
        return None
    given = {name.removeprefix("prefill_"): dump.arrays[name] for name in PREFILL}
    causal = dump.arrays.get("prefill_causal")
    return PrefillBatch(**given, causal=causal is None or bool(causal))


def _layer(dump: Dump, batch: Batch | None) -> LayerBatch | None:
    """Return the batch of a whole layer; ``None`` if the dump lacks its fields.

    Without a workspace in the dump, the workspace holds all keys, so that they are one chunk.
    """
    if batch is None or not has(dump, *LAYER):
        return None
    step = replace(batch, q_nope=dump.arrays["layer_q_nope"])
    keys = max(int(batch.seq_lens.astype(np.int64).sum()), dump.problem.max_query_tokens)
    return LayerBatch(
        step,
        dump.arrays["kv_b_proj"],
        int(dump.arrays.get("absorbed_rows", 0)),
        int(dump.arrays.get("workspace", keys)),
    )


def _batch(dump: Dump) -> tuple[Problem, Batch]:
    """Return a batch whose missing arrays are placeholders, and the problem that fits it."""
    problem, dims = dump.problem, dump.problem.dims
    given: dict[str, Any] = {name: dump.arrays[name] for name in _INPUTS if name in dump.arrays}
    tokens, element = _tokens(dump), numpy_dtype(problem.dtype)
    shapes = {
        "q_nope": (tokens, dims.num_heads, dims.kv_lora_rank),
        "q_pe": (tokens, dims.num_heads, dims.qk_rope_head_dim),
        "ckv": (tokens, dims.kv_lora_rank),
        "k_pe": (tokens, dims.qk_rope_head_dim),
    }
    for name, shape in shapes.items():
        given.setdefault(name, np.broadcast_to(np.zeros((), element), shape))  # uses no memory
    if "block_table" not in given:
        rows = len(given["seq_lens"])
        longest = max(int(given["seq_lens"].max(initial=0)), 0)
        columns = blocks_of(min(longest, problem.max_model_len), problem.block_size)
        if rows * columns > MOST_ENTRIES:
            wanted = f"{rows} rows of up to {longest} tokens without a block_table"
            raise InvalidArgument("seq_lens", wanted, f"at most {MOST_ENTRIES} blocks in all")
        table = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        given["block_table"] = table
        problem = replace(problem, num_blocks=max(problem.num_blocks, table.size))
    return problem, Batch(**given)


def _tokens(dump: Dump) -> int:
    """Return T, taken from the shape of any field, or else the number of the rows' tokens."""
    for name, array in dump.arrays.items():
        axes = FIELDS[name].shape(dump.problem) or ()
        if "T" in axes:
            return int(array.shape[axes.index("T")])
    sums = dump.arrays["cu_seqlens_q"]
    tokens = max(int(sums[-1]), 0) if sums.size else 0
    if tokens > MOST_ENTRIES:
        given = f"{tokens} tokens, in a dump without a tensor of tokens"
        raise InvalidArgument("cu_seqlens_q", given, f"at most {MOST_ENTRIES}")
    return tokens


def _image(dump: Dump, when: str) -> CacheImage | None:
    """Return the dump's cache "before" or "after" the step; ``None`` if the dump lacks it."""
    blocks = _raw_blocks(dump, when)
    if blocks is None or "block_ids" not in dump.arrays:
        return None
    layout, ids = dump.problem.layout, dump.arrays["block_ids"]
    if len(np.unique(ids)) < len(ids):
        raise InvalidArgument("block_ids", "the same block twice", "each block at most once")
    if ((ids < 0) | (ids >= layout.num_blocks)).any():
        raise InvalidArgument("block_ids", "blocks outside the cache", f"[0, {layout.num_blocks})")
    poison = dump.arrays.get("unlisted")
    if poison is None:
        poison = poisoned_image(layout).poison
    elif not poison.size or layout.block_stride % poison.size:
        allowed = f"a number that divides the {layout.block_stride} bytes of a block"
        raise InvalidArgument("unlisted", f"{poison.size} bytes", allowed)
    return CacheImage(layout, ids, blocks, poison)


def _raw_blocks(dump: Dump, when: str) -> NDArray[np.uint8] | None:
    """Return the listed blocks as bytes.

    ``cache_before`` and ``cache_after`` lack the bytes between tokens; these bytes are 0. The
    result is ``None`` if the dump lacks the cache or its scales.
    """
    if f"bytes_{when}" in dump.arrays:
        return dump.arrays[f"bytes_{when}"]
    rows, layout = dump.arrays.get(f"cache_{when}"), dump.problem.layout
    scales = dump.arrays.get(f"scales_{when}")
    needs_scales = layout.format.scales_per_block(layout.block_size) > 0
    if rows is None or (needs_scales and scales is None):
        return None
    contiguous = np.ascontiguousarray(rows).view(np.uint8)
    if layout.block_bytes * len(rows) == contiguous.size:
        return contiguous.reshape(len(rows), layout.block_bytes)
    blocks = np.zeros((len(rows), layout.block_bytes), np.uint8)
    layout.rows(blocks)[...] = contiguous.reshape(layout.rows(blocks).shape)
    if scales is not None:
        layout.scales(blocks)[...] = scales
    return blocks


def _with_computed_cache(step: Step) -> Step:
    """Return the step with the cache that the rules compute from its latents, if possible."""
    if step.batch is None or not step.has(*LATENTS) or not is_valid(step):
        return step
    if step.before is not None:
        after = append(step.problem, step.batch, step.before)
        return replace(step, after=after, computed="the cache before and the step's latents")
    live = step.batch.seq_lens > 0
    if step.has("slot_mapping") or not live.any() or context_lens(step.batch)[live].any():
        return step
    empty = poisoned_image(step.problem.layout)
    after = append(step.problem, step.batch, empty)
    return replace(step, after=after, computed="the step's latents: no row has a context")


def is_valid(step: Step) -> bool:
    """Return whether the step has a batch, with a mask for a tree, that the rules allow."""
    if step.batch is None or (step.problem.mask is Mask.TREE and not step.has("mask")):
        return False
    try:
        validate_batch(step.problem, step.batch)
    except InvalidArgument:
        return False
    return True
