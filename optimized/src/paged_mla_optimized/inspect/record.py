"""Dumps of running steps, for ``python -m paged_mla_reference explain``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.api import PagedMla
from paged_mla_optimized.cache import Cache, LatentCache, as_cache
from paged_mla_optimized.inspect.samples import Samples, blocks_near
from paged_mla_optimized.runtime.arrays import to_numpy
from paged_mla_optimized.tables import RequestMap
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import dtype_name
from paged_mla_shared.dump import Dump
from paged_mla_shared.problem import Mask, MaskSpelling, Problem

_HEAD_DIM = 128  # of heads between their projections, which attention does not see


class _Recorder:
    """What an instance is called with on its way to :class:`Samples`."""

    def __init__(self, mla: PagedMla, samples: Samples) -> None:
        self._mla, self._samples = mla, samples
        self._step, self._layer = -1, 0
        self._has_room = True  # for this layer
        self._given: dict[str, Any] = {}  # of the step
        self._arrays: dict[str, NDArray[Any]] = {}  # of the layer

    def plan(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        **named: Any,
    ) -> None:
        """Plan, and remember the step."""
        PagedMla.plan(self._mla, cu_seqlens_q, seq_lens, block_table, **named)
        self._step, self._layer = self._step + 1, 0
        self._given = {"cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens}
        if named.get("mask") is not None:
            self._given["mask"] = named["mask"]
        self._arrays = {}

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Append, and keep the cache before it."""
        if self._samples.wants(self._step, self._layer):
            cache = as_cache(self._mla.config.cache_format, cache)
            if self._begin(cache, slot_mapping):
                self._arrays |= {"ckv": to_numpy(ckv), "k_pe": to_numpy(k_pe)}
                self._keep(cache, "before")
        PagedMla.append(self._mla, ckv, k_pe, cache, slot_mapping)

    def attend(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: Cache, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and write what there is."""
        out, lse = PagedMla.attend(self._mla, q_nope, q_pe, cache, **named)
        if self._samples.wants(self._step, self._layer):
            cache = as_cache(self._mla.config.cache_format, cache)
            if self._arrays or (self._has_room and self._begin(cache, None)):
                answer = {"q_nope": q_nope, "q_pe": q_pe, "out": out, "lse": lse}
                self._arrays |= {name: to_numpy(tensor) for name, tensor in answer.items()}
                self._keep(cache, "after")
                self._write(cache)
        self._layer, self._arrays, self._has_room = self._layer + 1, {}, True
        return out, lse

    def _begin(self, cache: LatentCache, slot_mapping: torch.Tensor | None) -> bool:
        """Keep what the step is; return whether there is room for its blocks."""
        mla, size = self._mla, self._mla.config.block_size
        arrays = {name: to_numpy(tensor) for name, tensor in self._given.items()}
        arrays |= {"block_table": to_numpy(mla.block_table), "positions": to_numpy(mla.positions)}
        slots = to_numpy(mla.slot_mapping if slot_mapping is None else slot_mapping).copy()
        slots[(slots < 0) | (slots == mla.config.reserved_slot)] = -1
        arrays["slots" if slot_mapping is None else "slot_mapping"] = slots
        near = blocks_near(arrays["seq_lens"], arrays["block_table"], cache.latents)
        written = slots[(slots >= 0) & (slots < len(cache.latents) * size)] // size
        blocks = arrays["block_ids"] = np.union1d(near, written)
        per_block = cache.latents[:1].numel() * cache.latents.element_size()
        queries = arrays["positions"].size * mla.config.num_heads * mla.config.kv_lora_rank * 8
        self._has_room = self._samples.has_room(2 * per_block * len(blocks) + queries)
        self._arrays = arrays if self._has_room else {}
        return self._has_room

    def _keep(self, cache: LatentCache, when: str) -> None:
        """Keep the listed blocks as they are now."""
        ids = torch.from_numpy(self._arrays["block_ids"]).to(cache.latents.device)
        dtype, _ = self._mla.config.stored.row(self._dims())
        rows = cache.latents[ids]
        if dtype == "float8_e4m3":
            rows = rows.view(torch.float8_e4m3fn)
        self._arrays[f"cache_{when}"] = to_numpy(rows)
        if cache.scales is not None and cache.scales.dim():
            self._arrays[f"scales_{when}"] = to_numpy(cache.scales[ids])[:, 0]

    def _write(self, cache: LatentCache) -> None:
        config = self._mla.config
        dump = Dump(
            problem=self._problem(cache),
            arrays=self._arrays,
            origin=f"step {self._step}, layer {self._layer}",
            lse_base=config.lse_base,
            products=config.products,
        )
        self._samples.write(dump, f"{self._step:06}-{self._layer:03}")

    def _dims(self) -> MlaDims:
        config = self._mla.config
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        return MlaDims(config.num_heads, rank, rope, _HEAD_DIM, _HEAD_DIM)

    def _problem(self, cache: LatentCache) -> Problem:
        config = self._mla.config
        mask, _, spelling = config.mask.partition(":")
        scale = cache.scales
        return Problem(
            dims=self._dims(),
            dtype=dtype_name(self._arrays["out"].dtype),
            cache_format=config.cache_format,
            cache_scale=float(scale) if scale is not None and not scale.dim() else 1.0,
            block_size=config.block_size,
            num_blocks=len(cache.latents),
            max_rows=config.max_rows,
            max_query_tokens=config.max_query_tokens,
            max_model_len=config.max_model_len,
            softmax_scale=config.softmax_scale,
            mask=Mask(mask),
            mask_spelling=MaskSpelling(spelling or "qlen"),
            max_draft_tokens=config.max_draft_tokens,
            rope=config.rope,
        )


@contextmanager
def record(
    mla: PagedMla,
    folder: Path | str,
    *,
    every: int = 1,
    layers: Sequence[int] | None = None,
    most_bytes: int = 1 << 30,
) -> Iterator[Samples]:
    """Write dumps of what an instance is given and answers, while open.

    Layers are counted by their ``attend`` since the step's ``plan``. A sampled layer waits for the
    device and copies every block that its rows use, before and after; others cost nothing. What is
    captured in a graph, or compiled, is not seen.

    Parameters
    ----------
    mla : PagedMla
    folder : Path or str
        Made if it is not there.
    every : int
        One step of so many is sampled, >= 1.
    layers : sequence of int or None
        Layers of a sampled step; ``None`` takes all.
    most_bytes : int
        All dumps together, roughly; what does not fit is counted in ``skipped``.

    Yields
    ------
    Samples
        Of files ``step-layer.safetensors``.

    Raises
    ------
    InvalidArgument
        `every` is below 1.
    """
    samples = Samples(folder, every, layers, most_bytes)
    recorder = _Recorder(mla, samples)
    names = ("plan", "append", "attend")
    vars(mla).update({name: getattr(recorder, name) for name in names})
    try:
        yield samples
    finally:
        for name in names:
            del vars(mla)[name]
