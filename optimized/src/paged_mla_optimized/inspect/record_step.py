"""Record steps: planned, appended and attended tensors are written to dumps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.api.layer import MlaLayer, PlannedLayerStep
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

_HEAD_DIM = 128  # size of heads before projection, which does not affect attention


@dataclass
class _Step:
    """The stored data of one planned step; several steps may be planned at the same time.

    Parameters
    ----------
    number : int
        Number of steps that were planned before it while the recorder was open.
    given : dict of str to Tensor
        Its lengths and mask; empty if it is not sampled.
    layer : int
        Number of layers that have attended.
    arrays : dict of str to array
        Arrays of the dump of this layer so far.
    has_room : bool
        Whether the dump of this layer fits.
    """

    number: int
    given: dict[str, torch.Tensor]
    layer: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    has_room: bool = True


class StepRecorder:
    """Records the calls of a :class:`PagedMla` in :class:`Samples`."""

    def __init__(self, mla: PagedMla | MlaLayer, config: MlaConfig, samples: Samples) -> None:
        self._mla, self._config, self._samples = mla, config, samples
        self._plan, self._append = mla.plan, mla.append
        self._attend: Callable[..., tuple[torch.Tensor, torch.Tensor]] = mla.attend
        self._planned_steps = 0
        self._steps: WeakKeyDictionary[PlannedStep, _Step] = WeakKeyDictionary()

    def plan(self, step: MlaStep, **named: Any) -> PlannedStep:
        """Plan, and store the lengths and the mask of a sampled step."""
        planned = self._plan(step, **named)
        if torch.compiler.is_compiling():
            return planned
        kept = self._steps[planned] = _Step(self._planned_steps, {})
        self._planned_steps += 1
        if self._samples.wants_step(kept.number):
            given = {
                "cu_seqlens_q": step.cu_seqlens_q,
                "seq_lens": step.seq_lens,
                "mask": step.mask,
            }
            # Copies: the engine may write the next step's lengths after planning.
            kept.given = {name: t.clone() for name, t in given.items() if t is not None}
        return planned

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None = None,
        *,
        planned: PlannedStep | None = None,
    ) -> None:
        """Append, and store the inputs and the earlier cache blocks of a sampled layer."""
        if torch.compiler.is_compiling():
            self._append(ckv, k_pe, cache, slot_mapping, planned=planned)
            return
        planned = self._mla.planned if planned is None else planned
        step = self._step_of(planned)
        if step is not None and self._wants(step):
            cache = as_cache(self._config.cache_format, cache)
            if self._begin(step, planned, cache, slot_mapping):
                step.arrays |= {"ckv": to_numpy_spread(ckv), "k_pe": to_numpy_spread(k_pe)}
                self._keep(step, cache, "before")
        self._append(ckv, k_pe, cache, slot_mapping, planned=planned)
        if step is not None and step.arrays:
            step.arrays |= {"ckv_left": to_numpy(ckv), "k_pe_left": to_numpy(k_pe)}

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: Cache,
        *others: Any,
        planned: PlannedStep | None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, and write a dump if the layer is sampled and the dump fits."""
        if torch.compiler.is_compiling():
            return self._attend(q_nope, q_pe, cache, *others, planned=planned, **named)
        planned = self._mla.planned if planned is None else planned
        step = self._step_of(planned)
        answer = self._attend(q_nope, q_pe, cache, *others, planned=planned, **named)
        if step is None:
            return answer
        if self._wants(step):
            cache = as_cache(self._config.cache_format, cache)
            if step.arrays or (step.has_room and self._begin(step, planned, cache, None)):
                step.arrays["q_pe"] = to_numpy_spread(q_pe)
                step.arrays |= self._asked(q_nope, *others, planned=planned, **named)
                step.arrays |= self._answered(*answer)
                self._keep(step, cache, "after")
                self._write(step, cache)
        step.layer, step.arrays, step.has_room = step.layer + 1, {}, True
        return answer

    def _step_of(self, planned: PlannedStep) -> _Step | None:
        """Return the stored data of a step, if it was planned while the recorder was open."""
        return self._steps.get(planned) if isinstance(planned, PlannedStep) else None

    def _wants(self, step: _Step) -> bool:
        return bool(step.given) and self._samples.wants(step.number, step.layer)

    def _asked(self, q_nope: torch.Tensor, *_: Any, **__: Any) -> dict[str, NDArray[Any]]:
        """Return further inputs of `attend` for the dump."""
        return {"q_nope": to_numpy_spread(q_nope)}

    def _answered(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, NDArray[Any]]:
        return {"out": to_numpy(out), "lse": to_numpy(lse)}

    def _begin(
        self,
        step: _Step,
        planned: PlannedStep,
        cache: LatentCache,
        slot_mapping: torch.Tensor | None,
    ) -> bool:
        """Store the description of the step; return whether its blocks fit."""
        config, size = self._config, self._config.block_size
        arrays = {name: to_numpy(tensor) for name, tensor in step.given.items()}
        if config.is_tree and config.mask != "tree:packed":
            query_lens = np.diff(arrays["cu_seqlens_q"]).astype(np.int64)
            elements = mask_elements(config, query_lens, arrays["seq_lens"])
            arrays["mask"] = arrays["mask"][:elements]
        arrays["block_table"] = to_numpy(planned.block_table)
        arrays["positions"] = to_numpy(planned.positions)
        slots = to_numpy(planned.slot_mapping if slot_mapping is None else slot_mapping).copy()
        slots[(slots < 0) | (slots == config.reserved_slot)] = -1
        arrays["slots" if slot_mapping is None else "slot_mapping"] = slots
        near = blocks_near(arrays["seq_lens"], arrays["block_table"], cache.latents)
        written = slots[(slots >= 0) & (slots < len(cache.latents) * size)] // size
        blocks = arrays["block_ids"] = np.union1d(near, written)
        per_block = cache.latents[:1].numel() * cache.latents.element_size()
        queries = arrays["positions"].size * config.num_heads * config.kv_lora_rank * 8
        step.has_room = self._samples.has_room(2 * per_block * len(blocks) + queries)
        step.arrays = arrays if step.has_room else {}
        return step.has_room

    def _keep(self, step: _Step, cache: LatentCache, when: str) -> None:
        """Store the listed blocks as they are now."""
        ids = torch.from_numpy(step.arrays["block_ids"]).to(cache.latents.device)
        dtype, _ = self._config.stored.row(self.dims)
        rows = cache.latents[ids]
        if dtype == "float8_e4m3":
            rows = rows.view(torch.float8_e4m3fn)
        step.arrays[f"cache_{when}"] = to_numpy(rows)
        if cache.scales is not None and cache.scales.dim():
            step.arrays[f"scales_{when}"] = to_numpy(cache.scales[ids])[:, 0]

    def _write(self, step: _Step, cache: LatentCache) -> None:
        config = self._config
        dump = Dump(
            problem=self._problem(cache),
            arrays=step.arrays,
            origin=f"step {step.number}, layer {step.layer}",
            lse_base=config.lse_base,
            products=config.products,
        )
        self._samples.write(dump, f"{step.number:06}-{step.layer:03}")

    @property
    def dims(self) -> MlaDims:
        """The dimensions of the dumps, with a placeholder for the size of heads."""
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
    """Records the calls of an :class:`MlaLayer` in :class:`Samples`."""

    _mla: MlaLayer

    def _asked(self, q_nope: torch.Tensor, *others: Any, **named: Any) -> dict[str, NDArray[Any]]:
        step: PlannedLayerStep = named["planned"]
        weights: HeadWeights = named["weights"] if not others else others[0]
        # A layer without materialized rows has no workspace; this is the smallest that S-21 allows.
        workspace = max(self._mla.config.room, self._config.max_query_tokens)
        return {
            "layer_q_nope": to_numpy_spread(q_nope),
            "kv_b_proj": to_numpy(weights.kv_b_proj),
            "absorbed_rows": np.array(step.absorbed_rows, np.int32),
            "workspace": np.array(workspace, np.int64),
        }

    def _answered(self, out: torch.Tensor, lse: torch.Tensor) -> dict[str, NDArray[Any]]:
        return {"layer_out": to_numpy(out), "layer_lse": to_numpy(lse)}

    @property
    def dims(self) -> MlaDims:
        """The dimensions of the dumps."""
        config = self._mla.config
        dims = super().dims
        return replace(dims, qk_nope_head_dim=config.qk_nope_head_dim, v_head_dim=config.v_head_dim)
