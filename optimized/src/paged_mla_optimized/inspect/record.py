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
from paged_mla_optimized.runtime.arrays import to_numpy
from paged_mla_optimized.tables import RequestMap
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import dtype_name
from paged_mla_shared.dump import Dump, save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask, MaskSpelling, Problem

_HEAD_DIM = 128  # of heads between their projections, which attention does not see


class Recorder:
    """What :func:`record` has written.

    Attributes
    ----------
    written : list of Path
        One file for each sampled layer of each sampled step, ``step-layer.safetensors``.
    skipped : int
        Dumps that there was no room for.
    """

    def __init__(
        self,
        mla: PagedMla,
        folder: Path,
        every: int,
        layers: Sequence[int] | None,
        most_bytes: int,
    ) -> None:
        self.written: list[Path] = []
        self.skipped = 0
        self._mla, self._folder, self._room = mla, folder, most_bytes
        self._every, self._layers = every, layers
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
        if self._is_sampled():
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
        if self._is_sampled():
            cache = as_cache(self._mla.config.cache_format, cache)
            if self._arrays or (self._has_room and self._begin(cache, None)):
                answer = {"q_nope": q_nope, "q_pe": q_pe, "out": out, "lse": lse}
                self._arrays |= {name: to_numpy(tensor) for name, tensor in answer.items()}
                self._keep(cache, "after")
                self._write(cache)
        self._layer, self._arrays, self._has_room = self._layer + 1, {}, True
        return out, lse

    def _is_sampled(self) -> bool:
        """Return whether this layer is written: never inside a graph, which cannot wait."""
        if torch.compiler.is_compiling() or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return False
        chosen = self._layers is None or self._layer in self._layers
        return self._step >= 0 and self._step % self._every == 0 and chosen

    def _begin(self, cache: LatentCache, slot_mapping: torch.Tensor | None) -> bool:
        """Keep what the step is; return whether there is room for its blocks."""
        mla, size = self._mla, self._mla.config.block_size
        arrays = {name: to_numpy(tensor) for name, tensor in self._given.items()}
        arrays |= {"block_table": to_numpy(mla.block_table), "positions": to_numpy(mla.positions)}
        slots = to_numpy(mla.slot_mapping if slot_mapping is None else slot_mapping).copy()
        slots[(slots < 0) | (slots == mla.config.reserved_slot)] = -1
        arrays["slots" if slot_mapping is None else "slot_mapping"] = slots
        used = -(-arrays["seq_lens"].astype(np.int64) // size)
        inside = np.arange(arrays["block_table"].shape[1]) < used[:, None]
        written = slots[slots >= 0] // size
        blocks = np.union1d(arrays["block_table"][inside], written).astype(np.int64)
        arrays["block_ids"] = blocks[(blocks >= 0) & (blocks < len(cache.latents))]
        per_block = cache.latents[:1].numel() * cache.latents.element_size()
        queries = arrays["positions"].size * mla.config.num_heads * mla.config.kv_lora_rank * 8
        if 2 * per_block * len(blocks) + queries > self._room:
            self.skipped += 1
            self._has_room = False
            return False
        self._arrays = arrays
        return True

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
        path = self._folder / f"{self._step:06}-{self._layer:03}.safetensors"
        config = self._mla.config
        dump = Dump(
            problem=self._problem(cache),
            arrays=self._arrays,
            origin=f"step {self._step}, layer {self._layer}",
            lse_base=config.lse_base,
            products=config.products,
        )
        save_dump(dump, path)
        self._room -= path.stat().st_size
        self.written.append(path)

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
) -> Iterator[Recorder]:
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
    Recorder

    Raises
    ------
    InvalidArgument
        `every` is below 1.
    """
    if every < 1:
        raise InvalidArgument("every", every, ">= 1")
    Path(folder).mkdir(parents=True, exist_ok=True)
    recorder = Recorder(mla, Path(folder), every, layers, most_bytes)
    names = ("plan", "append", "attend")
    vars(mla).update({name: getattr(recorder, name) for name in names})
    try:
        yield recorder
    finally:
        for name in names:
            del vars(mla)[name]
