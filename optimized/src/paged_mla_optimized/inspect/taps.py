"""Record the intermediate results of the portable attend kernel for one query and head of a dump.

The kernel runs in Triton's interpreter, which needs no GPU. The scores, maxima, sums and outputs of
each part of its work can be compared with those of the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.portable import attend
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.triton_compat.interpreter import is_interpreting
from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Mask
from paged_mla_shared.taps import Taps

_LN_2 = np.float32(np.log(2))
_NEEDED = ("cu_seqlens_q", "seq_lens", "block_table", "q_nope", "q_pe", "block_ids", "cache_after")
_CPU = torch.device("cpu")


@dataclass
class _Part:
    """A part of the work: keys and scores of its tiles, then its results."""

    keys: list[NDArray[np.int64]] = field(default_factory=list)
    scores: list[NDArray[np.float32]] = field(default_factory=list)
    sums: tuple[np.float32, ...] = ()  # peak, total, lse
    out: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))


def taps_of(dump: Dump, token: int, head: int) -> Taps:
    """Run the kernel on one query and head of a dump, and return its intermediate results.

    The query runs alone, so its keys are divided into parts as in a step without other rows. A dump
    of bfloat16, which the interpreter does not support, runs in float32; unlike on a device,
    softmax weights are then not rounded.

    Parameters
    ----------
    dump : Dump
        A dump with lengths, table, queries, ``block_ids`` and ``cache_after``, of a step without a
        tree mask.
    token, head : int
        A query token of the step that sees a key, and a head, both from 0.

    Raises
    ------
    InvalidArgument
        The dump lacks an array or a block of the row, has no such token or head, or the token sees
        no key.
    Unsupported
        The step has draft trees, or a rope without a causal mask; or Triton's interpreter is not
        active: set ``TRITON_INTERPRET=1`` before Triton is imported.
    """
    if not is_interpreting():
        raise Unsupported("taps of compiled kernels are not supported; set TRITON_INTERPRET=1")
    if dump.problem.mask is Mask.TREE:
        raise Unsupported("taps of draft trees are not supported; use a step without a tree mask")
    row, keys = _seen(dump, token, head)
    columns = -(-keys // dump.problem.block_size)
    table = dump.arrays["block_table"][row, :columns]
    if len(table) < columns:  # a dump of a faulty step may have this; the kernel would read past it
        raise InvalidArgument("block_table", f"{len(table)} columns", f"at least {columns}")
    mla = PagedMla(_config(dump, keys), _CPU)
    places = {int(block): place for place, block in enumerate(dump.arrays["block_ids"])}
    if lacking := [int(block) for block in table if int(block) not in places]:
        raise InvalidArgument("block_ids", f"no block {lacking[0]}", "every block of the row")
    listed = torch.tensor([[places[int(block)] for block in table]], dtype=torch.int32)
    mla.plan(
        MlaStep(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([keys], dtype=torch.int32),
            listed,
            num_tokens=1,
        )
    )
    one = np.s_[token : token + 1, head : head + 1]
    q_nope, q_pe = (_tensor(dump.arrays[name][one], mla.config) for name in ("q_nope", "q_pe"))
    with _listening() as parts:
        out, lse = mla.attend(q_nope, q_pe, _cache(dump, mla.config))
    return _joined(token, head, parts, out[0, 0], lse[0, 0])


def _seen(dump: Dump, token: int, head: int) -> tuple[int, int]:
    """Return the row of a token, and the number of keys that it sees."""
    arrays, heads = dump.arrays, dump.problem.dims.num_heads
    if lacking := [name for name in _NEEDED if name not in arrays]:
        raise InvalidArgument("dump", f"no {', '.join(lacking)}", ", ".join(_NEEDED))
    starts = arrays["cu_seqlens_q"]
    if not 0 <= token < starts[-1]:
        raise InvalidArgument("token", token, f"0 to {starts[-1] - 1}, of the rows")
    if not 0 <= head < heads:
        raise InvalidArgument("head", head, f"0 to {heads - 1}")
    row = int(np.searchsorted(starts, token, side="right")) - 1
    keys = int(arrays["seq_lens"][row])
    if dump.problem.mask is Mask.CAUSAL:
        keys -= int(starts[row + 1]) - 1 - token
    elif dump.problem.rope is not None:
        raise Unsupported(
            "taps of rotated queries are not supported without a causal mask; use a step with a "
            "causal mask or without a rope"
        )
    if keys < 1:
        raise InvalidArgument("token", f"{token}, which sees no key", "a token that sees a key")
    return row, keys


def _config(dump: Dump, keys: int) -> MlaConfig:
    problem, dims = dump.problem, dump.problem.dims
    stored = problem.cache_format
    return MlaConfig(
        num_heads=1,
        softmax_scale=problem.softmax_scale,
        block_size=problem.block_size,
        max_rows=1,
        max_query_tokens=1,
        max_model_len=keys,
        kv_lora_rank=dims.kv_lora_rank,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        dtype=torch.float16 if problem.dtype == "float16" else torch.float32,
        cache_format="fp32" if stored == "bf16" else stored,
        mask=str(problem.mask),
        rope=problem.rope,
    )


def _tensor(array: NDArray[Any], config: MlaConfig) -> torch.Tensor:
    """Return an array in a dtype that the interpreter supports."""
    dtype = np.float16 if config.dtype is torch.float16 else np.float32
    return torch.from_numpy(np.ascontiguousarray(array).astype(dtype))


def _cache(dump: Dump, config: MlaConfig) -> LatentCache:
    rows = dump.arrays["cache_after"]
    if not config.is_fp8:
        return LatentCache(config.cache_format, _tensor(rows, config))
    codes = torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).copy())
    scales = dump.arrays.get("scales_after")
    if scales is not None:
        return LatentCache(config.cache_format, codes, torch.from_numpy(scales[:, None].copy()))
    if config.stored.inline_scales:
        return LatentCache(config.cache_format, codes)
    return LatentCache(config.cache_format, codes, torch.tensor(dump.problem.cache_scale))


@contextmanager
def _listening() -> Iterator[list[_Part]]:
    """Yield the parts that the kernel works on, for the first row of its query tiles."""
    parts = [_Part()]

    def tile(_token: Any, _head: Any, live: Any, number: Any, scores: Any) -> None:
        if _array(live)[0]:
            line = _array(scores)[0]
            seen = np.flatnonzero(~np.isneginf(line))
            parts[-1].keys.append(int(_array(number)) * len(line) + seen)
            parts[-1].scores.append(line[seen] * _LN_2)

    def part(_token: Any, _head: Any, live: Any, peak: Any, total: Any, lse: Any, out: Any) -> None:
        if _array(live)[0]:
            done = parts[-1]
            done.sums = (_array(peak)[0] * _LN_2, _array(total)[0], _array(lse)[0])
            done.out = np.concatenate([_array(share)[0] for share in out])
            parts.append(_Part())

    kept = {"tap_tile": attend.tap_tile, "tap_part": attend.tap_part}
    vars(attend).update(tap_tile=tile, tap_part=part)
    try:
        yield parts
    finally:
        vars(attend).update(kept)


def _array(value: Any) -> NDArray[Any]:
    """Return the array of an interpreter value or of a number."""
    return np.array(value.handle.data if hasattr(value, "handle") else value).squeeze()


def _joined(
    token: int, head: int, parts: list[_Part], out: torch.Tensor, lse: torch.Tensor
) -> Taps:
    """Return the taps of the parts that have keys, in the order of the keys."""
    some = sorted((p for p in parts if p.sums and sum(map(len, p.keys))), key=_first)
    keys = [np.concatenate(part.keys) for part in some]
    sums = np.array([part.sums for part in some], np.float32)
    return Taps(
        token=token,
        head=head,
        keys=np.concatenate(keys),
        scores=np.concatenate([x for part in some for x in part.scores]).astype(np.float32),
        spans=np.array([[k.min(), k.max()] for k in keys], np.int64),
        highest=sums[:, 0],
        total=sums[:, 1],
        part_lse=sums[:, 2],
        part_out=np.array([part.out for part in some], np.float32)[:, : len(out)],
        lse=lse.float().numpy(),
        out=out.float().numpy(),
    )


def _first(part: _Part) -> int:
    return int(np.concatenate(part.keys)[0])
