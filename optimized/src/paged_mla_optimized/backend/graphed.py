"""Run steps from CUDA graphs that are captured once per problem and replayed per batch (S-17)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paged_mla_optimized.backend.eager import EagerRunner
from paged_mla_optimized.backend.places import OwnAllocations, PlacesOf
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.serving.graph import GraphedStep
from paged_mla_optimized.serving.inputs import Bucket, StepInputs, StepView
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Problem


class GraphedRunner(EagerRunner):
    """A runner that loads each batch into fixed tensors and replays graphs, which also plan.

    A call is captured at its first use, in a bucket as large as the problem and in a bucket half as
    large. Before a replay, the outputs and the inputs that the batch does not fill are NaN or an
    invalid number; the lines of padded tokens have the padding of :class:`StepInputs`.
    """

    def __init__(
        self,
        problem: Problem,
        config: MlaConfig,
        device: str,
        places_of: PlacesOf = OwnAllocations,
    ) -> None:
        super().__init__(problem, config, device, places_of)
        tokens, rows, dtype = config.max_query_tokens, config.max_rows, config.dtype
        per_head = (tokens, config.num_heads)
        rank, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "q_nope": (*per_head, rank),
            "q_pe": (*per_head, rope_dim),
            "ckv": (tokens, rank),
            "k_pe": (tokens, rope_dim),
        }
        self._inputs = StepInputs(config, device, {n: (s, dtype) for n, s in shapes.items()})
        # Separate from the inputs, whose values are invalid during a capture: -1 writes nothing.
        self._slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self._out = torch.empty(shapes["q_nope"], dtype=dtype, device=device)
        self._lse = torch.empty(per_head, dtype=torch.float32, device=device)
        self._buckets = (Bucket(tokens, rows), Bucket(-(-tokens // 2), -(-rows // 2)))
        self._steps: dict[str, GraphedStep] = {}

    def _plan(self, tensors: dict[str, torch.Tensor]) -> None:
        """Do nothing, since the graphs plan."""

    def _metadata(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        positions, slots = self._replay("plan", tensors)
        tokens = len(tensors["q_nope"])
        return positions[:tokens], slots[:tokens]

    def _append(self, tensors: dict[str, torch.Tensor]) -> None:
        given = "slot_mapping" in tensors
        self._replay("append to slots" if given else "append", tensors)

    def _attend(
        self, tensors: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        self._replay("attend", tensors)
        out.copy_(self._out[: len(out)])
        lse.copy_(self._lse[: len(lse)])

    def _replay(self, call: str, tensors: dict[str, torch.Tensor]) -> Any:
        """Load the step of `tensors` and replay the graph of `call`."""
        if call not in self._steps:
            self._steps[call] = self._record(call)
        step, inputs = self._steps[call], self._inputs
        inputs.poison()
        width = inputs.block_table.shape[1]  # no row has blocks after this width
        batch = MlaStep(
            tensors["cu_seqlens_q"],
            tensors["seq_lens"],
            tensors["block_table"][:, :width],
            num_tokens=len(tensors["q_nope"]),
            mask=tensors.get("mask"),
        )
        inputs.load(batch, {name: tensors[name] for name in inputs.tokens})
        self._slots.fill_(-1)
        if "slot_mapping" in tensors:
            self._slots[: len(tensors["slot_mapping"])].copy_(tensors["slot_mapping"])
        self._out.fill_(torch.nan)
        self._lse.fill_(torch.nan)
        return step.replay(len(tensors["seq_lens"]), len(tensors["q_nope"]))

    def _record(self, call: str) -> GraphedStep:
        """Capture `call` with functions that reference tensors of this runner, not the runner."""
        mla, cache, given, out, lse = self._mla, self._cache, self._slots, self._out, self._lse

        def plan(_view: StepView) -> tuple[torch.Tensor, torch.Tensor]:
            return mla.positions, mla.slot_mapping

        def append(view: StepView) -> None:
            mla.append(view.tokens["ckv"], view.tokens["k_pe"], cache)

        def append_to_slots(view: StepView) -> None:
            slots = given[: view.bucket.tokens]
            mla.append(view.tokens["ckv"], view.tokens["k_pe"], cache, slots)

        def attend(view: StepView) -> None:
            n = view.bucket.tokens
            q_nope, q_pe = view.tokens["q_nope"], view.tokens["q_pe"]
            mla.attend(q_nope, q_pe, cache, out=out[:n], lse=lse[:n])

        functions: dict[str, Callable[[StepView], Any]] = {
            "plan": plan,
            "append": append,
            "append to slots": append_to_slots,
            "attend": attend,
        }
        step = functions[call]
        return GraphedStep([mla], step, self._inputs, self._buckets, caches=[cache])
