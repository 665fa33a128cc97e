"""Recorders of steps: what is planned, appended and attended to becomes a dump."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.api.layer import MlaLayer
from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.api.planned import PlannedStep
from paged_mla_optimized.config.attention import DTYPE_NAMES, MlaConfig
from paged_mla_optimized.inspect.samples import Samples, blocks_near
from paged_mla_optimized.runtime.arrays import to_numpy, to_numpy_spread
from paged_mla_optimized.tensors.head_weights import HeadWeights
from paged_mla_optimized.tensors.latent_cache import Cache, LatentCache, as_cache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tensors.values.lengths import mask_elements
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dump import Dump
from paged_mla_shared.problem import Mask, MaskSpelling, Problem

_HEAD_DIM = 128  # of heads between their projections, which attention does not see


class StepRecorder:
    """What a :class:`PagedMla` is called with on its way to :class:`Samples`."""

    def __init__(self, mla: PagedMla | MlaLayer, config: MlaConfig, samples: Samples) -> None:
        self._mla, self._config, self._samples = mla, config, samples
        self._plan, self._append, self._attend = mla.plan, mla.append, mla.attend
        self._step, self._layer = -1, 0
        self._has_room = True  # for this layer
        self._given: dict[str, torch.Tensor] = {}  # of the step, where it is sampled
        self._arrays: dict[str, NDArray[Any]] = {}  # of the layer

    def plan(self, step: MlaStep, **named: Any) -> PlannedStep:
        """Plan, and remember the step."""
        planned = self._plan(step, **named)
        self._step, self._layer = self._step + 1, 0
        self._given, self._arrays = {}, {}
        if self._samples.wants_step(self._step):
            given = {
                "cu_seqlens_q": step.cu_seqlens_q,
                "seq_lens": step.seq_lens,
                "mask": step.mask,
            }
            # Copies: an engine may write the next step's once this one is planned.
            self._given = {name: t.clone() for name, t in given.items() if t is not None}
        return planned

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None = None,
        **named: Any,
    ) -> None:
        """Append, and keep the cache before it."""
        if self._wants():
            cache = as_cache(self._config.cache_format, cache)
            if self._begin(cache, slot_mapping):
                self._arrays |= {"ckv": to_numpy_spread(ckv), "k_pe": to_numpy_spread(k_pe)}
                self._keep(cache, "before")
        self._append(ckv, k_pe, cache, slot_mapping, **named)
        if self._arrays:
            self._arrays |= {"ckv_left": to_numpy(ckv), "k_pe_left": to_numpy(k_pe)}

    def attend(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, cache: Cache, *others: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and write what there is."""
        answer = self._attend(q_nope, q_pe, cache, *others, **named)
        if self._wants():
            cache = as_cache(self._config.cache_format, cache)
            if self._arrays or (self._has_room and self._begin(cache, None)):
                self._arrays["q_pe"] = to_numpy_spread(q_pe)
                self._arrays |= self._asked(q_nope, *others, **named)
                self._arrays |= self._answered(*answer)
                self._keep(cache, "after")
                self._write(cache)
        self._layer, self._arrays, self._has_room = self._layer + 1, {}, True
        return answer

    def _wants(self) -> bool:
        return bool(self._given) and self._samples.wants(self._step, self._layer)

    def _asked(self, q_nope: torch.Tensor, *_: Any, **__: Any) -> dict[str, NDArray[Any]]:
        """Return what else `attend` was given."""
        return {"q_nope": to_numpy_spread(q_nope)}

    def _answered(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, NDArray[Any]]:
        return {"out": to_numpy(out), "lse": to_numpy(lse)}

    def _begin(self, cache: LatentCache, slot_mapping: torch.Tensor | None) -> bool:
        """Keep what the step is; return whether there is room for its blocks."""
        mla, config, size = self._mla, self._config, self._config.block_size
        arrays = {name: to_numpy(tensor) for name, tensor in self._given.items()}
        if config.is_tree and config.mask != "tree:packed":
            query_lens = np.diff(arrays["cu_seqlens_q"]).astype(np.int64)
            elements = mask_elements(config, query_lens, arrays["seq_lens"])
            arrays["mask"] = arrays["mask"][:elements]
        arrays |= {"block_table": to_numpy(mla.block_table), "positions": to_numpy(mla.positions)}
        slots = to_numpy(mla.slot_mapping if slot_mapping is None else slot_mapping).copy()
        slots[(slots < 0) | (slots == config.reserved_slot)] = -1
        arrays["slots" if slot_mapping is None else "slot_mapping"] = slots
        near = blocks_near(arrays["seq_lens"], arrays["block_table"], cache.latents)
        written = slots[(slots >= 0) & (slots < len(cache.latents) * size)] // size
        blocks = arrays["block_ids"] = np.union1d(near, written)
        per_block = cache.latents[:1].numel() * cache.latents.element_size()
        queries = arrays["positions"].size * config.num_heads * config.kv_lora_rank * 8
        self._has_room = self._samples.has_room(2 * per_block * len(blocks) + queries)
        self._arrays = arrays if self._has_room else {}
        return self._has_room

    def _keep(self, cache: LatentCache, when: str) -> None:
        """Keep the listed blocks as they are now."""
        ids = torch.from_numpy(self._arrays["block_ids"]).to(cache.latents.device)
        dtype, _ = self._config.stored.row(self.dims)
        rows = cache.latents[ids]
        if dtype == "float8_e4m3":
            rows = rows.view(torch.float8_e4m3fn)
        self._arrays[f"cache_{when}"] = to_numpy(rows)
        if cache.scales is not None and cache.scales.dim():
            self._arrays[f"scales_{when}"] = to_numpy(cache.scales[ids])[:, 0]

    def _write(self, cache: LatentCache) -> None:
        config = self._config
        dump = Dump(
            problem=self._problem(cache),
            arrays=self._arrays,
            origin=f"step {self._step}, layer {self._layer}",
            lse_base=config.lse_base,
            products=config.products,
        )
        self._samples.write(dump, f"{self._step:06}-{self._layer:03}")

    @property
    def dims(self) -> MlaDims:
        """Head sizes."""
        config = self._config
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        return MlaDims(config.num_heads, rank, rope, _HEAD_DIM, _HEAD_DIM)

    def _problem(self, cache: LatentCache) -> Problem:
        config = self._config
        mask, _, spelling = config.mask.partition(":")
        scale = cache.scales
        return Problem(
            dims=self.dims,
            dtype=DTYPE_NAMES[config.dtype],
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


class LayerRecorder(StepRecorder):
    """What an :class:`MlaLayer` is called with, likewise."""

    _mla: MlaLayer

    def _asked(self, q_nope: torch.Tensor, *others: Any, **named: Any) -> dict[str, NDArray[Any]]:
        weights: HeadWeights = named["weights"] if not others else others[0]
        return {
            "layer_q_nope": to_numpy_spread(q_nope),
            "kv_b_proj": to_numpy(weights.kv_b_proj),
            "absorbed_rows": np.array(self._mla.absorbed_rows, np.int32),
            "workspace": np.array(self._mla.config.room, np.int64),
        }

    def _answered(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, NDArray[Any]]:
        return {"layer_out": to_numpy(out), "layer_lse": to_numpy(lse)}

    @property
    def dims(self) -> MlaDims:
        """Head sizes."""
        config = self._mla.config
        dims = super().dims
        return replace(dims, qk_nope_head_dim=config.qk_nope_head_dim, v_head_dim=config.v_head_dim)
