"""Decode rows of vLLM's steps: described by the metadata builder, attended to by every layer."""

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
    """A step, planned by the layer that comes first in a forward: in a CUDA graph if there is one.

    A replay then plans by itself, and costs the host nothing. So a plan reads lengths and tables
    as they are when layers run, and is made again in every forward. A target's step may be a
    draft's too, whose layers are others.

    Parameters
    ----------
    decode : Decode
    query_start_loc : int32 [B + 1]
    seq_lens : int32 [B]
        This step's tokens included; of this rank's tokens under context parallelism.
    block_table : int32 [B, M]
    num_tokens : int
        Padding included.
    slot_mapping : int64 [T] or None
        Where vLLM writes the step's tokens, -1 for nowhere; ``None`` where it is not known.
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
        """Attend the step's queries to one layer's cache.

        Parameters
        ----------
        layer : object
            Whose cache it is.
        q : dtype [T, H, R] and [T, H, P], or both in one [T, H, R + P]
            T counts the padding of a CUDA graph.
        latents, k_scale
            As :func:`~paged_mla_optimized.engines.tensors.as_cache` takes them.
        forward : object
            An object that all layers of a forward share; ``None`` where there is none: then a
            forward begins with the layer that came first in the last one.

        Returns
        -------
        out : dtype [T, H, R]
        lse : float32 [T, H]
            Natural; ``(0, -inf)`` where nothing is seen, as on a rank that caches no key of a row.

        Raises
        ------
        RuntimeError
            Another step was planned since this forward's first layer ran.
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
            raise RuntimeError("another step was planned between two layers of this one")
        q_nope, q_pe = split_queries(q, mla.config.kv_lora_rank)
        return mla.attend(q_nope, q_pe, cache)

    def _begins(self, layer: object, forward: object) -> bool:
        """Return whether a layer is the first of a forward."""
        if self._first_layer is None or layer is self._first_layer:
            return True
        return forward is not None and (self._forward is None or self._forward() is not forward)


class Decode:
    """A :class:`~paged_mla_optimized.api.paged_mla.PagedMla` that is fed as vLLM feeds a backend.

    Parameters
    ----------
    config : MlaConfig
    device : torch.device
    query_lens : sequence of int
        As :func:`~paged_mla_optimized.engines.vllm.convert.query_len` takes them. With
        ``batch_invariant`` the longest chooses the kernel of every step: bits differ from kernel to
        kernel, and which of them a step gets follows from all of its rows (S-20).

    Attributes
    ----------
    mla : PagedMla
    planned : Step or None
        The latest one.
    """

    def __init__(
        self, config: MlaConfig, device: torch.device | str, query_lens: Sequence[int]
    ) -> None:
        # Its block 0 is vLLM's null block, in which steps lie that are no request's.
        self.mla = PagedMla(replace(config, reserved_slot=0), device)
        self.mla.writes_elsewhere()
        self._switch = CheckSwitch(self.mla.device)
        self._query_lens = query_lens[-1:] if config.batch_invariant else query_lens
        self.planned: Step | None = None
        self._is_warm = False

    def warm_up(self, cache: Cache) -> None:
        """Compile all kernels before the first step but those that are captured.

        vLLM captures graphs of some lengths; what others get would compile while requests wait.
        """
        if self._is_warm or is_capturing(self.mla.device):
            return
        self.mla.warm_up(cache)
        self._is_warm = True

    def check(self, step: Step, scales: Sequence[torch.Tensor] = ()) -> None:
        """With ``PAGED_MLA_CHECK=1``, hold a step against the rules, and FP8 layers' scales.

        A builder calls it for each step: a replay of a graph plans where nothing can be said.

        Parameters
        ----------
        step : Step
        scales : sequence of float32 [] or [1]
            Of the layers, in order.

        Raises
        ------
        InvalidArgument
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
        """Plan a step."""
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
    """Lengths of steps, each copied to the same place: there a graph reads those of its replays.

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
        """Return copies of int32 [B + 1] and [B], which the next call overwrites.

        Raises
        ------
        InvalidArgument
            Other dtypes or shapes: a copy would convert them, and cut off what int32 cannot hold.
        """
        rows = len(seq_lens)
        check_tensor("query_start_loc", query_start_loc, (rows + 1,), torch.int32, None)
        check_tensor("seq_lens", seq_lens, (rows,), torch.int32, None)
        starts, lens = self._query_start_loc[: rows + 1], self._seq_lens[:rows]
        starts.copy_(query_start_loc)
        lens.copy_(seq_lens)
        return starts, lens
