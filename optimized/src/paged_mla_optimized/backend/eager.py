"""Run the methods of ``PagedMla`` for the suite, with NumPy arrays as inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.api.layer import MlaLayer
from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.backend.memory import Memory
from paged_mla_optimized.backend.places import OwnAllocations, PlacesOf
from paged_mla_optimized.config.arguments import check_scale
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.layer import LayerConfig
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.merge.partials import merge_partials
from paged_mla_optimized.runtime.arrays import to_numpy, to_torch
from paged_mla_optimized.tensors import checks
from paged_mla_optimized.tensors.head_weights import HeadWeights
from paged_mla_optimized.tensors.step import MlaStep, RequestMap
from paged_mla_shared.backend import Runner
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem


class EagerRunner(Runner):
    """An implementation of :class:`paged_mla_shared.backend.Runner`, with eager launches.

    Parameters
    ----------
    problem : Problem
    config : MlaConfig
    device : str
    places_of : callable
        Returns the object that allocates the tensors of this runner.

    Attributes
    ----------
    checks_values : bool
        Whether the values of a step are checked against the rules before it is planned.
    """

    checks_values = True

    def __init__(
        self,
        problem: Problem,
        config: MlaConfig,
        device: str,
        places_of: PlacesOf = OwnAllocations,
    ) -> None:
        self._problem = problem
        self._mla = self._instance(config, device)
        self._places = places_of(self._mla.device)
        self._memory = Memory(problem, self._mla.device, self._places)
        self._cache = self._memory.cache
        self._planned: Batch | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._prefills: dict[bool, Prefill] = {}
        self._layers: dict[int, MlaLayer] = {}

    def _instance(self, config: MlaConfig, device: str) -> PagedMla:
        """Return the instance that runs steps."""
        return PagedMla(config, device)

    def load_cache(self, image: CacheImage) -> None:
        """Make the cache equal to `image`, in place."""
        self._memory.load(image)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the raw bytes of blocks, uint8 [n, block_bytes]."""
        return self._memory.read(block_ids)

    def plan(self, batch: Batch) -> Metadata:
        """Check and plan `batch`; return its positions and slots."""
        positions, slots = self._metadata(self._prepare(batch))
        return Metadata(to_numpy(positions), to_numpy(slots))

    def append(self, batch: Batch) -> None:
        """Write the batch's latents."""
        self._append(self._prepare(batch))

    def attend(self, batch: Batch) -> Output:
        """Attend with outputs that are NaN before, so that missing writes are visible."""
        tensors = self._prepare(batch)
        q_nope = tensors["q_nope"]
        out, lse = self._unwritten(q_nope, q_nope.shape[2])
        self._attend(tensors, out, lse)
        return Output(to_numpy(out), to_numpy(lse))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partial results."""
        if not partials:
            raise InvalidArgument("partials", "none", "at least one")
        device, shape = self._mla.device, partials[0].out.shape
        outs = [to_torch("out", partial.out, device) for partial in partials]
        lses = [to_torch("lse", partial.lse, device) for partial in partials]
        for out, lse in zip(outs, lses, strict=True):
            checks.check_tensor("out", out, shape, torch.float32, device)
            checks.check_tensor("lse", lse, shape[:2], torch.float32, device)
            if not (lse < torch.inf).all():
                raise InvalidArgument("lse", "NaN or +inf", "finite values, and -inf for no key")
        place = self._places.input
        out, lse = merge_partials(
            place("partials' out", torch.stack(outs)), place("partials' lse", torch.stack(lses))
        )
        return Output(to_numpy(out), to_numpy(lse))

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return every row's cached latents and rotated keys, row by row."""
        self._prepare(batch)
        config = self._mla.config
        keys = int(self._mla.cu_seqlens_k[-1])  # keys of legal rows
        ckv, k_pe = (
            self._places.room(f"the gathered {name}", (keys, width), config.dtype)
            for name, width in (("ckv", config.kv_lora_rank), ("k_pe", config.qk_rope_head_dim))
        )
        self._mla.gather_context(self._cache, ckv, k_pe)
        return to_numpy(ckv), to_numpy(k_pe)

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Quantize the batch's queries."""
        tensors = self._prepare(batch)
        given = None
        if scale is not None:
            check_scale("scale", scale)
            given = torch.tensor(scale, dtype=torch.float32, device=self._mla.device)
        codes, scales = self._mla.quantize_queries(tensors["q_nope"], tensors["q_pe"], scale=given)
        return to_numpy(codes.view(torch.uint8)), to_numpy(scales)

    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to materialized keys, with outputs that are NaN before."""
        tensors = {
            name: self._placed(name, array)
            for name, array in vars(batch).items()
            if isinstance(array, np.ndarray)
        }
        lengths = [tensors.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
        out, lse = self._unwritten(tensors["q_nope"], self._problem.dims.v_head_dim)
        prefill = self._prefill_of(batch.causal)
        num_tokens, config = batch.num_tokens, self._mla.config
        checks.check_capacity(
            config, batch.num_rows, num_tokens, rows="cu_seqlens_q", tokens="q_nope"
        )
        prefill.check(*lengths, num_tokens=num_tokens, num_keys=len(tensors["k_nope"]))
        longest = int(batch.seq_lens.max(initial=0))
        if longest > config.max_model_len:
            allowed = f"rows of at most max_model_len = {config.max_model_len}"
            raise InvalidArgument("cu_seqlens_k", f"a row of {longest} keys", allowed)
        prefill.plan(*lengths, num_tokens=num_tokens)
        prefill.attend(**tensors, out=out, lse=lse)
        return Output(to_numpy(out), to_numpy(lse))

    def layer(self, batch: LayerBatch) -> Output:
        """Append and attend between a layer's projections, with outputs that are NaN before."""
        config, device, dims = self._mla.config, self._mla.device, self._problem.dims
        step = batch.step
        tensors = {name: self._placed(name, array) for name, array in batch.arrays.items()}
        lengths = (tensors["cu_seqlens_q"], tensors["seq_lens"], tensors["block_table"])
        slots, mask = tensors.get("slot_mapping"), tensors.get("mask")
        num_tokens = step.num_tokens
        self._check_values(tensors, num_tokens)
        checks.check_latents(config, tensors["ckv"], tensors["k_pe"], num_tokens, device)
        self._check_heads(tensors, num_tokens)
        weights = HeadWeights.of_kv_b_proj(
            tensors["kv_b_proj"], dims.num_heads, dims.qk_nope_head_dim
        )
        q_nope, q_pe = tensors["q_nope"], tensors["q_pe"]
        out, lse = self._unwritten(q_nope, dims.v_head_dim)
        layer = self._layer_of(batch.workspace)
        layer.plan(
            MlaStep(
                *lengths,
                num_tokens=num_tokens,
                query_lens=step.query_lens.tolist(),
                max_seq_lens=step.seq_lens.tolist(),
                mask=mask,
            ),
            absorbed_rows=batch.absorbed_rows,
        )
        layer.append(tensors["ckv"], tensors["k_pe"], self._cache, slots)
        layer.attend(q_nope, q_pe, self._cache, weights, out=out, lse=lse)
        return Output(to_numpy(out), to_numpy(lse))

    def _check_heads(self, tensors: dict[str, torch.Tensor], num_tokens: int) -> None:
        """Check the inputs of `MlaLayer.attend` before anything is appended."""
        config, dims, device = self._mla.config, self._problem.dims, self._mla.device
        heads, nope, rope = dims.num_heads, dims.qk_nope_head_dim, dims.qk_rope_head_dim
        for name, shape in (
            ("q_nope", (num_tokens, heads, nope)),
            ("q_pe", (num_tokens, heads, rope)),
            ("kv_b_proj", (heads * (nope + dims.v_head_dim), dims.kv_lora_rank)),
        ):
            checks.check_tensor(name, tensors[name], shape, config.dtype, device)

    def _layer_of(self, workspace: int) -> MlaLayer:
        if workspace not in self._layers:
            dims = self._problem.dims
            config = LayerConfig(
                attention=self._mla.config,
                qk_nope_head_dim=dims.qk_nope_head_dim,
                v_head_dim=dims.v_head_dim,
                workspace_tokens=workspace,
            )
            self._layers[workspace] = MlaLayer(config, self._mla.device)
        return self._layers[workspace]

    def _prefill_of(self, causal: bool) -> Prefill:  # noqa: FBT001 - a field of the batch
        if causal not in self._prefills:
            problem, config = self._problem, self._mla.config
            self._prefills[causal] = Prefill(
                PrefillConfig(
                    num_heads=config.num_heads,
                    softmax_scale=config.softmax_scale,
                    max_rows=config.max_rows,
                    max_tokens=config.max_query_tokens,
                    qk_nope_head_dim=problem.dims.qk_nope_head_dim,
                    qk_rope_head_dim=problem.dims.qk_rope_head_dim,
                    v_head_dim=problem.dims.v_head_dim,
                    dtype=config.dtype,
                    causal=causal,
                ),
                self._mla.device,
            )
        return self._prefills[causal]

    def _prepare(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Check and plan `batch`, unless it is the planned batch; return its tensors."""
        if batch is self._planned:
            return self._tensors
        device, config = self._mla.device, self._mla.config
        tensors = {
            name: self._placed(name, array)
            for name, array in vars(batch).items()
            if array is not None
        }
        num_tokens = batch.num_tokens
        checks.check_queries(config, tensors["q_nope"], tensors["q_pe"], num_tokens, device)
        checks.check_latents(config, tensors["ckv"], tensors["k_pe"], num_tokens, device)
        self._check_values(tensors, num_tokens)
        self._plan(tensors)
        self._planned, self._tensors = batch, tensors
        return tensors

    def _placed(self, name: str, array: NDArray[Any]) -> torch.Tensor:
        """Return an array as an input tensor of kernels."""
        return self._places.input(name, to_torch(name, array, self._mla.device))

    def _unwritten(self, q: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs for queries [T, H, ..], filled with NaN: out [T, H, width], lse [T, H]."""
        lines = tuple(q.shape[:2])
        out = self._places.room("the output", (*lines, width), q.dtype).fill_(torch.nan)
        return out, self._places.room("the lse", lines, torch.float32).fill_(torch.nan)

    def _check_values(self, tensors: dict[str, torch.Tensor], num_tokens: int) -> None:
        """Check the values of a step against the rules, if ``checks_values`` is set."""
        if self.checks_values:
            self._mla.check(
                MlaStep(
                    tensors["cu_seqlens_q"],
                    tensors["seq_lens"],
                    tensors["block_table"],
                    num_tokens=num_tokens,
                    mask=tensors.get("mask"),
                ),
                num_blocks=self._problem.num_blocks,
                slot_mapping=tensors.get("slot_mapping"),
            )

    def _plan(self, tensors: dict[str, torch.Tensor]) -> None:
        """Plan the step of `tensors`."""
        self._mla.plan(
            MlaStep(
                tensors["cu_seqlens_q"],
                tensors["seq_lens"],
                self._table(tensors),
                num_tokens=len(tensors["q_nope"]),
                mask=tensors.get("mask"),
            )
        )

    def _table(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | RequestMap:
        """Return the block table or request map for the plan."""
        return tensors["block_table"]

    def _metadata(self, _tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and slots of the planned step."""
        return self._mla.positions, self._mla.slot_mapping

    def _append(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write the latents of the planned step."""
        slots = tensors.get("slot_mapping")
        self._mla.append(tensors["ckv"], tensors["k_pe"], self._cache, slots)

    def _attend(
        self, tensors: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write the outputs of the planned step."""
        self._mla.attend(tensors["q_nope"], tensors["q_pe"], self._cache, out=out, lse=lse)
