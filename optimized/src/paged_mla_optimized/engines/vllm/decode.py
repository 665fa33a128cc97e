"""The decode rows of vLLM's steps. The metadata builder describes a step; every layer attends."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.engines.tensors import as_cache, split_queries
from paged_mla_optimized.engines.vllm.convert import query_len
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.runtime.device import is_capturing
from paged_mla_optimized.tensors.checks import check_tensor
from paged_mla_optimized.tensors.latent_cache import Cache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tensors.values.scales import check_layer_scale


@dataclass(eq=False)
class Step:
    """The decode rows of one step.

    The first layer of each forward plans the step. In a CUDA graph the plan is captured with the
    layers, so that a replay plans on the device and needs no work on the host. A plan therefore
    reads the lengths and tables that are in memory when the layers run. A draft model may reuse the
    step of its target model; the draft model has different layers, and its forward plans again.

    Parameters
    ----------
    decode : Decode
    query_start_loc : int32 [B + 1]
    seq_lens : int32 [B]
        The number of keys of each row, this step's tokens included. With context parallelism they
        count the keys of this rank.
    block_table : int32 [B, M]
    num_tokens : int
        The number of tokens T, padding included.
    slot_mapping : int64 [T] or None
        The slots to which vLLM writes the step's tokens, -1 for tokens that it does not write;
        ``None`` if they are unknown.
    """

    decode: Decode
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_tokens: int
    slot_mapping: torch.Tensor | None = None
    _first_layer: object = field(default=None, init=False)
    _forward: weakref.ref[Any] | None = field(default=None, init=False)

    def attend(
        self,
        layer: object,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        latents: torch.Tensor,
        k_scale: torch.Tensor,
        forward: object = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the attention of the step's queries over one layer's cache.

        Parameters
        ----------
        layer : object
            The layer that the cache belongs to.
        q : dtype [T, H, R] and [T, H, P], or joined [T, H, R + P]
            T includes the padding of a CUDA graph.
        latents, k_scale
            The arguments of :func:`~paged_mla_optimized.engines.tensors.as_cache`.
        forward : object
            An object that is the same for all layers of one forward. With ``None`` a new forward
            starts with the layer that came first in the previous forward.

        Returns
        -------
        out : dtype [T, H, R]
        lse : float32 [T, H]
            The natural lse. Output and lse are 0 and ``-inf`` for a query token without keys, for
            example on a rank that caches no key of its row.

        Raises
        ------
        RuntimeError
            Another step was planned after the first layer of this forward ran.
        """
        mla = self.decode.mla
        cache = as_cache(mla.config.cache_format, latents, k_scale)
        if self._begins(layer, forward):
            self.decode.warm_up(cache)
            self._first_layer = layer
            self._forward = None if forward is None else weakref.ref(forward)
            self.decode.plan(self)
            self.decode.planned = self
        elif self.decode.planned is not self:
            raise RuntimeError(
                "another step was planned between two layers of this step; "
                "run all layers of a forward before the next step is planned"
            )
        q_nope, q_pe = split_queries(q, mla.config.kv_lora_rank)
        return mla.attend(q_nope, q_pe, cache)

    def _begins(self, layer: object, forward: object) -> bool:
        """Return whether `layer` is the first layer of a forward."""
        if self._first_layer is None or layer is self._first_layer:
            return True
        return forward is not None and (self._forward is None or self._forward() is not forward)


class Decode:
    """A :class:`~paged_mla_optimized.api.paged_mla.PagedMla` with the inputs of a vLLM backend.

    Parameters
    ----------
    config : MlaConfig
    device : torch.device
    query_lens : sequence of int
        The candidate lengths of :func:`~paged_mla_optimized.engines.vllm.convert.query_len`. With
        ``batch_invariant`` the longest length selects the kernel variant of every step, because
        variants differ in their bits and all rows of a step would decide its variant (S-20).

    Attributes
    ----------
    mla : PagedMla
    planned : Step or None
        The step that was planned last.
    """

    def __init__(
        self, config: MlaConfig, device: torch.device | str, query_lens: Sequence[int]
    ) -> None:
        # Slot 0 is reserved: block 0 is vLLM's null block, which dummy steps of no request use.
        self.mla = PagedMla(replace(config, reserved_slot=0), device)
        self.mla.writes_elsewhere()
        self._switch = CheckSwitch(self.mla.device)
        self._query_lens = query_lens[-1:] if config.batch_invariant else query_lens
        self.planned: Step | None = None
        self._is_warm = False

    def warm_up(self, cache: Cache) -> None:
        """Compile all kernels at the first step outside of a graph capture.

        vLLM captures graphs of some lengths only. Without this call the kernels of other lengths
        would be compiled while requests wait.
        """
        if self._is_warm or is_capturing(self.mla.device):
            return
        self.mla.warm_up(cache)
        self._is_warm = True

    def check(self, step: Step, scales: Sequence[torch.Tensor] = ()) -> None:
        """Check a step and the scales of FP8 layers if ``PAGED_MLA_CHECK=1`` is set.

        The builder calls it for each step, because the plan of a graph's replay runs on the device
        only and cannot raise an error.

        Parameters
        ----------
        step : Step
        scales : sequence of float32 [] or [1]
            The scales of the layers, in order.

        Raises
        ------
        InvalidArgument
            The step violates a rule of the contract, or a scale is invalid.
        """
        if not self._switch.is_on:
            return
        if self.mla.config.is_fp8:
            for layer, scale in enumerate(scales):
                check_layer_scale(scale, layer)
        self.mla.check(
            MlaStep(
                step.query_start_loc, step.seq_lens, step.block_table, num_tokens=step.num_tokens
            ),
            slot_mapping=step.slot_mapping,
        )

    def plan(self, step: Step) -> None:
        """Plan a step for the query length that ``query_len`` returns."""
        hint = query_len(len(step.seq_lens), step.num_tokens, self._query_lens)
        self.mla.plan(
            MlaStep(
                step.query_start_loc,
                step.seq_lens,
                step.block_table,
                num_tokens=step.num_tokens,
                max_query_len=hint,
            )
        )


class FixedLengths:
    """Copy the lengths of each step to the same buffers, where the replays of a graph read them.

    Parameters
    ----------
    max_rows : int
    device : torch.device
    """

    def __init__(self, max_rows: int, device: torch.device | str) -> None:
        self._query_start_loc = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def hold(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of both tensors, int32 [B + 1] and [B], which the next call overwrites.

        Raises
        ------
        InvalidArgument
            A tensor has another dtype or shape. The copy would convert another dtype and truncate
            values that do not fit int32.
        """
        rows = len(seq_lens)
        check_tensor("query_start_loc", query_start_loc, (rows + 1,), torch.int32, None)
        check_tensor("seq_lens", seq_lens, (rows,), torch.int32, None)
        starts, lens = self._query_start_loc[: rows + 1], self._seq_lens[:rows]
        starts.copy_(query_start_loc)
        lens.copy_(seq_lens)
        return starts, lens
