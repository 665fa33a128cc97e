"""Checks of every input that the rules restrict.

An implementation that declares the feature "validation" raises :class:`InvalidArgument` for the
same inputs, with the same argument name, before it writes anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.rounding import round_to
from paged_mla_reference.rules.validation.masks import validate_mask
from paged_mla_reference.rules.validation.tables import validate_slots, validate_table
from paged_mla_shared.dtypes import dtype_name, numpy_dtype
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE, CacheFormat
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Mask, Output, Problem, Rows
from paged_mla_shared.rope import legal_rope


def validate_problem(problem: Problem) -> None:
    """Raise ``InvalidArgument`` if no runner can be built for `problem`."""
    if problem.dtype not in PLAIN_FORMAT_OF_DTYPE:
        raise InvalidArgument("dtype", problem.dtype, "one of " + ", ".join(PLAIN_FORMAT_OF_DTYPE))
    if problem.cache_format not in FORMATS:
        raise InvalidArgument("cache_format", problem.cache_format, "one of " + ", ".join(FORMATS))
    stored = FORMATS[problem.cache_format]
    if stored.is_plain and stored.ckv_dtype != problem.dtype:
        allowed = f"{PLAIN_FORMAT_OF_DTYPE[problem.dtype]} for dtype {problem.dtype}"
        raise InvalidArgument("cache_format", problem.cache_format, allowed)
    _validate_scale("cache_scale", problem.cache_scale)
    _validate_sizes(problem)
    _validate_shares(problem, stored)
    itemsize = numpy_dtype(stored.ckv_dtype).itemsize
    for name in ("token_padding", "block_padding"):
        padding = getattr(problem, name)
        if padding < 0 or padding % itemsize:
            raise InvalidArgument(name, f"{padding} bytes", f"multiples of {itemsize} bytes, >= 0")
    scale = problem.softmax_scale
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidArgument("softmax_scale", scale, "a finite number > 0")
    if problem.rope is not None:
        legal_rope(problem.rope)


def validate_query_scale(scale: float | None) -> None:
    """Raise ``InvalidArgument`` unless `scale` is ``None`` or a finite float32 > 0 (S-11)."""
    if scale is not None:
        _validate_scale("scale", scale)


def _validate_scale(name: str, scale: float) -> None:
    rounded = round_to(np.array(scale), "float32")
    if not (np.isfinite(rounded) and rounded > 0):
        raise InvalidArgument(name, scale, "a finite float32 > 0")


def _validate_sizes(problem: Problem) -> None:
    dims = problem.dims
    sizes = {
        "num_heads": dims.num_heads,
        "kv_lora_rank": dims.kv_lora_rank,
        "qk_rope_head_dim": dims.qk_rope_head_dim,
        "qk_nope_head_dim": dims.qk_nope_head_dim,
        "v_head_dim": dims.v_head_dim,
        "block_size": problem.block_size,
        "num_blocks": problem.num_blocks,
        "max_rows": problem.max_rows,
        "max_query_tokens": problem.max_query_tokens,
        "max_model_len": problem.max_model_len,
    }
    for name, size in sizes.items():
        if not _is_integer(size) or size < 1:
            raise InvalidArgument(name, size, "integers >= 1")
    if dims.qk_rope_head_dim % 2:
        raise InvalidArgument("qk_rope_head_dim", dims.qk_rope_head_dim, "even sizes")
    drafts = problem.max_draft_tokens
    if not _is_integer(drafts):
        raise InvalidArgument("max_draft_tokens", drafts, "an integer")
    if problem.mask is Mask.TREE and drafts < 1:
        raise InvalidArgument("max_draft_tokens", drafts, ">= 1 with a tree mask")
    if problem.mask is not Mask.TREE and drafts != 0:
        raise InvalidArgument("max_draft_tokens", drafts, f"0 when the mask is {problem.mask}")


def _is_integer(size: object) -> bool:
    return isinstance(size, Integral) and not isinstance(size, bool)


def _validate_shares(problem: Problem, stored: CacheFormat) -> None:
    """Raise ``InvalidArgument`` if the scale groups of a format do not divide a size (S-11)."""
    multiple = stored.block_size_multiple
    if problem.block_size % multiple:
        allowed = f"multiples of {multiple} for cache_format {stored.name}"
        raise InvalidArgument("block_size", problem.block_size, allowed)
    rank = problem.dims.kv_lora_rank
    if stored.inline_scales and rank % stored.inline_scales:
        allowed = f"multiples of {stored.inline_scales} for cache_format {stored.name}"
        raise InvalidArgument("kv_lora_rank", rank, allowed)


def validate_batch(problem: Problem, batch: Batch) -> None:
    """Raise ``InvalidArgument`` if the rules forbid `batch` on a runner of `problem`.

    The function checks shapes and types first, then lengths, then the blocks of the rows, then the
    mask, and then the slots. It does not check values that no operation may read (S-9).
    """
    _validate_arrays(problem, batch)
    _validate_lengths(problem, batch)
    validate_table(problem, batch)
    validate_mask(problem, batch)
    validate_slots(problem, batch)


def validate_prefill(problem: Problem, batch: PrefillBatch) -> None:
    """Raise ``InvalidArgument`` if the rules forbid `batch` on a runner of `problem` (S-21)."""
    dims, dtype = problem.dims, problem.dtype
    heads, nope, rope = dims.num_heads, dims.qk_nope_head_dim, dims.qk_rope_head_dim
    tokens, keys = batch.q_nope.shape[:1], batch.k_nope.shape[:1]
    if not tokens:
        raise InvalidArgument("q_nope", "an array without axes", "shape [T, H, N]")
    if not keys:
        raise InvalidArgument("k_nope", "an array without axes", "shape [Tk, H, N]")
    rows = batch.cu_seqlens_q.size - 1
    if rows < 0:
        raise InvalidArgument("cu_seqlens_q", "no entry", "shape [B + 1]")
    _check("q_nope", batch.q_nope, dtype, (*tokens, heads, nope))
    _check("q_pe", batch.q_pe, dtype, (*tokens, heads, rope))
    _check("k_nope", batch.k_nope, dtype, (*keys, heads, nope))
    _check("k_pe", batch.k_pe, dtype, (*keys, rope))
    _check("v", batch.v, dtype, (*keys, heads, dims.v_head_dim))
    _check("cu_seqlens_q", batch.cu_seqlens_q, "int32", (rows + 1,))
    _check("cu_seqlens_k", batch.cu_seqlens_k, "int32", (rows + 1,))
    _validate_capacity(problem, batch)
    _validate_prefix_sums("cu_seqlens_q", batch.cu_seqlens_q, "T", *tokens)
    _validate_prefix_sums("cu_seqlens_k", batch.cu_seqlens_k, "Tk", *keys)
    longest = int(batch.seq_lens.max(initial=0))
    if longest > problem.max_model_len:
        allowed = f"rows of at most max_model_len = {problem.max_model_len} keys"
        raise InvalidArgument("cu_seqlens_k", f"a row of {longest} keys", allowed)


def validate_layer(problem: Problem, batch: LayerBatch) -> None:
    """Raise ``InvalidArgument`` if the rules forbid `batch` on a runner of `problem` (S-21)."""
    dims, step = problem.dims, batch.step
    heads, nope = dims.num_heads, dims.qk_nope_head_dim
    _check("q_nope", step.q_nope, problem.dtype, (*step.q_nope.shape[:1], heads, nope))
    absorbed = np.zeros((*step.q_nope.shape[:2], dims.kv_lora_rank), step.q_nope.dtype)
    validate_batch(problem, replace(step, q_nope=absorbed))
    lines = heads * (nope + dims.v_head_dim)
    _check("kv_b_proj", batch.kv_b_proj, problem.dtype, (lines, dims.kv_lora_rank))
    if not 0 <= batch.absorbed_rows <= step.num_rows:
        raise InvalidArgument("absorbed_rows", batch.absorbed_rows, f"0 to {step.num_rows} rows")
    if problem.mask is not Mask.CAUSAL and batch.absorbed_rows != step.num_rows:
        allowed = f"all {step.num_rows} rows when the mask is {problem.mask}"
        raise InvalidArgument("absorbed_rows", batch.absorbed_rows, allowed)
    if batch.workspace < problem.max_query_tokens:
        allowed = f">= max_query_tokens = {problem.max_query_tokens}"
        raise InvalidArgument("workspace", batch.workspace, allowed)


def validate_partials(partials: Sequence[Output]) -> None:
    """Raise ``InvalidArgument`` unless `partials` can be merged (S-8)."""
    if not partials:
        raise InvalidArgument("partials", "none", "at least one partial result")
    shape = partials[0].out.shape
    if len(shape) != 3:
        raise InvalidArgument("out", f"{len(shape)} axes", "shape [T, H, R]")
    for partial in partials:
        _check("out", partial.out, "float32", shape)
        _check("lse", partial.lse, "float32", shape[:2])
        if not np.all(partial.lse < np.inf):
            raise InvalidArgument("lse", "NaN or +inf", "finite values, and -inf without keys")


def _check(name: str, array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> None:
    if dtype_name(array.dtype) != dtype:
        raise InvalidArgument(name, f"dtype {dtype_name(array.dtype)}", dtype)
    if array.shape != shape:
        raise InvalidArgument(name, f"shape {array.shape}", f"shape {shape}")


def _validate_arrays(problem: Problem, batch: Batch) -> None:
    dims = problem.dims
    tokens = batch.q_nope.shape[:1]
    if not tokens:
        raise InvalidArgument("q_nope", "an array without axes", "shape [T, H, R]")
    rows = batch.cu_seqlens_q.size - 1
    if rows < 0:
        raise InvalidArgument("cu_seqlens_q", "no entry", "shape [B + 1]")
    _check("q_nope", batch.q_nope, problem.dtype, (*tokens, dims.num_heads, dims.kv_lora_rank))
    _check("q_pe", batch.q_pe, problem.dtype, (*tokens, dims.num_heads, dims.qk_rope_head_dim))
    _check("ckv", batch.ckv, problem.dtype, (*tokens, dims.kv_lora_rank))
    _check("k_pe", batch.k_pe, problem.dtype, (*tokens, dims.qk_rope_head_dim))
    _check("cu_seqlens_q", batch.cu_seqlens_q, "int32", (rows + 1,))
    _check("seq_lens", batch.seq_lens, "int32", (rows,))
    if batch.block_table.ndim != 2:
        raise InvalidArgument("block_table", f"{batch.block_table.ndim} axes", "shape [B, M]")
    _check("block_table", batch.block_table, "int32", (rows, batch.block_table.shape[1]))
    if batch.slot_mapping is not None:
        _check("slot_mapping", batch.slot_mapping, "int64", tokens)
    _validate_capacity(problem, batch)


def _validate_capacity(problem: Problem, batch: Rows) -> None:
    if batch.num_rows > problem.max_rows:
        raise InvalidArgument("max_rows", f"{batch.num_rows} rows", f"<= {problem.max_rows} rows")
    if batch.num_tokens > problem.max_query_tokens:
        allowed = f"<= {problem.max_query_tokens} tokens"
        raise InvalidArgument("max_query_tokens", f"{batch.num_tokens} tokens", allowed)


def _validate_prefix_sums(name: str, sums: NDArray[np.int32], axis: str, limit: int) -> None:
    sums = sums.astype(np.int64)
    if sums[0] != 0:
        raise InvalidArgument(name, f"first entry {sums[0]}", "first entry 0")
    if (np.diff(sums) < 0).any():
        raise InvalidArgument(name, "decreasing entries", "entries that never decrease")
    if sums[-1] > limit:
        raise InvalidArgument(name, f"last entry {sums[-1]}", f"<= {axis} = {limit}")


def _validate_lengths(problem: Problem, batch: Batch) -> None:
    seq_lens = batch.seq_lens
    _validate_prefix_sums("cu_seqlens_q", batch.cu_seqlens_q, "T", batch.num_tokens)
    if (seq_lens < 0).any():
        raise InvalidArgument("seq_lens", f"{seq_lens.min()}", ">= 0")
    if (seq_lens > problem.max_model_len).any():
        allowed = f"<= max_model_len = {problem.max_model_len}"
        raise InvalidArgument("seq_lens", f"{seq_lens.max()}", allowed)
    if problem.mask is Mask.NON_CAUSAL:
        return
    short = np.flatnonzero((seq_lens > 0) & (seq_lens < batch.query_lens))
    if short.size:
        row = int(short[0])
        given = f"{seq_lens[row]} in row {row}, whose query_len is {batch.query_lens[row]}"
        raise InvalidArgument("seq_lens", given, "0, or >= query_len unless the mask is non_causal")
