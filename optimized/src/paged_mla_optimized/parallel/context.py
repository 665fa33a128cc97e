"""Paged MLA over a cache that is divided over the ranks of a group (rule S-18)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.arguments import check_kind, integer
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.operations.merge.lines import MergeLines
from paged_mla_optimized.operations.shard.launch import Shard
from paged_mla_optimized.parallel.exchange import Exchange
from paged_mla_optimized.parallel.heads import heads_of_rank
from paged_mla_optimized.parallel.sharding import local_config, local_len
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_optimized.tensors import checks
from paged_mla_optimized.tensors.latent_cache import (
    Cache,
    LatentCache,
    as_cache,
    blocks_of_cache,
    empty_cache,
    named_tensors,
)
from paged_mla_optimized.tensors.overlap import check_apart
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tensors.values.blocks import Paging, Table
from paged_mla_optimized.tensors.values.scales import check_scales_read
from paged_mla_optimized.tensors.values.steps import check_step_values
from paged_mla_shared.errors import InvalidArgument

_TABLE_STRIDES = (1, 16, 17)  # Triton compiles for 1, for multiples of 16, and for the others


class ContextParallelMla(Uncopied):
    """Paged MLA of one rank: its share of the cached tokens, all queries, the answers of its heads.

    Every rank makes the same calls with the same lengths and block table, and with queries of its
    own heads (:func:`~paged_mla_optimized.parallel.heads.heads_of_rank`). Queries go to all ranks,
    each attends them to the keys it has, and partial answers go to the rank of their heads, which
    merges them by their lse. A rank without a key of a row adds nothing to it.

    Every buffer is allocated here, none later but the answers of an ``attend`` that is given no
    tensors for them. Nothing waits for the device, so a step can be captured in a CUDA graph on
    every rank, after one that ran eagerly.

    Parameters
    ----------
    config : MlaConfig
        Of the group: all heads, lengths of whole rows; causal and without a rope. Every token is a
        row of its own on each rank, so ``max_query_tokens`` is at most 32766; ``num_heads`` is at
        most the largest multiple of the ranks up to 128. ``block_size`` counts the tokens of a
        block on one rank, so that a block of the table is
        ``block_size * world`` tokens long; and ``reserved_slot`` is one of each rank's own slots.
    group : ProcessGroup or None
        The ranks; ``None`` is the default group.
    device : str or torch.device
    interleave : int
        Consecutive tokens that one rank gets, a divisor of ``block_size``.

    Raises
    ------
    InvalidArgument
        This process is no member of the group, there are more ranks than heads, or the config
        asks for what no rank can do alone.
    Unsupported
        No kernel runs on `device`; or bfloat16 in Triton's interpreter.
    """

    def __init__(
        self,
        config: MlaConfig,
        group: dist.ProcessGroup | None = None,
        device: str | torch.device = "cuda",
        *,
        interleave: int = 1,
    ) -> None:
        check_kind("config", config, MlaConfig)
        group = group or dist.group.WORLD
        if group is None:
            raise InvalidArgument("group", None, "a group, or torch.distributed initialised")
        check_kind("group", group, dist.ProcessGroup)  # torch has a number for no member
        world, rank = group.size(), group.rank()
        self.config = config
        self.heads = heads_of_rank(config.num_heads, world, rank)
        """Of all heads, those of this rank."""
        self._own = replace(config, num_heads=len(self.heads))
        local = local_config(config, world=world, interleave=interleave)
        self._mla = PagedMla(local, device)
        self._mla.writes_elsewhere()  # its rows are queries, and it is told their slots
        self.device = self._mla.device
        self._switch = CheckSwitch(self.device)
        self._world, self._rank, self._interleave = world, rank, interleave
        self._shard = Shard(
            config,
            world=world,
            rank=rank,
            interleave=interleave,
            table_width=-(-local.max_model_len // local.block_size),
            device=self.device,
        )
        self._exchange = Exchange(config, group, self.device)
        self._merge = MergeLines(config)
        self._num_tokens = 0

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the planned step in whole rows (S-3), int64 [T]; 0 for padding."""
        return self._shard.positions[: self._num_tokens]

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the planned step on this rank, int64 [T]; -1 for other ranks' and padding."""
        return self._shard.slot_mapping[: self._num_tokens]

    @property
    def local_lens(self) -> torch.Tensor:
        """Keys of this rank that each query of the planned step sees, int32 [T]."""
        return self._shard.local_lens[: self._num_tokens]

    def new_cache(self, num_blocks: int) -> LatentCache:
        """Return this rank's cache of one layer, as :meth:`PagedMla.new_cache` does.

        A block has ``block_size`` tokens of this rank; all ranks have as many blocks.
        """
        return empty_cache(self.config, num_blocks, self.device)

    def warm_up(self, cache: Cache) -> None:
        """Compile what any step launches, as :meth:`PagedMla.warm_up` does; all ranks call it.

        For block tables of any width, and answers that :meth:`attend` allocates. Nothing of the
        cache is written. The planned step is lost: plan again.

        Parameters
        ----------
        cache
            As for :meth:`attend`.

        Raises
        ------
        InvalidArgument
            As :meth:`attend` does.
        """
        self._mla.warm_up(cache)
        starts = torch.zeros(2, dtype=torch.int32, device=self.device)
        for stride in _TABLE_STRIDES:
            self.plan(MlaStep(starts, starts[:1], starts.new_zeros((1, stride)), num_tokens=1))
        own = self._own
        width = own.kv_lora_rank + own.qk_rope_head_dim
        queries = torch.zeros(1, own.num_heads, width, dtype=own.dtype, device=self.device)
        self.attend(queries[..., : own.kv_lora_rank], queries[..., own.kv_lora_rank :], cache)

    def plan(self, step: MlaStep) -> None:
        """Describe a step. Three launches; lengths are read on the device only.

        Parameters
        ----------
        step : MlaStep
            The same on all ranks: lengths of whole rows, and a block table, which is read here
            alone. Without a mask.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or capacity is wrong.
        """
        self._check_step(step)
        num_tokens, table = integer("num_tokens", step.num_tokens), step.block_table
        assert isinstance(table, torch.Tensor)
        shard = self._shard
        own = {"local_lens": shard.local_lens, "the rank's own block table": shard.block_table}
        check_apart(own, step.tensors | {"block_table": table})
        if self._switch.is_on:
            self.check(step)
        self._num_tokens = num_tokens
        if num_tokens > 0:
            shard.launch(step.cu_seqlens_q, step.seq_lens, table, num_tokens)
        self._mla.plan(
            MlaStep(
                shard.cu_seqlens_q[: num_tokens + 1],
                shard.local_lens[:num_tokens],
                shard.block_table[:num_tokens],
                num_tokens=num_tokens,
                max_query_len=1,
            )
        )

    def check(
        self,
        step: MlaStep,
        *,
        num_blocks: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        """Hold the *values* of a step against the rules; for debugging, since it synchronises.

        Nothing is sent: each rank may call it alone.

        Parameters
        ----------
        step : MlaStep
            As for :meth:`plan`.
        num_blocks, cache
            As for :meth:`PagedMla.check`, of this rank; scales are looked at where it has tokens.

        Raises
        ------
        InvalidArgument
            Names the argument that no rule allows.
        """
        config = self.config
        self._check_step(step)
        if cache is not None:
            cache = as_cache(config.cache_format, cache)
            checks.check_cache(config, cache, self.device)
        check_step_values(
            config,
            step,
            num_blocks=blocks_of_cache(num_blocks, cache),
            paging=Paging.of(config, self._world, self._interleave),
        )
        if cache is not None:
            query_lens = step.cu_seqlens_q.diff().cpu().numpy()
            lens, table = step.seq_lens.cpu().numpy(), step.block_table
            assert isinstance(table, torch.Tensor)
            local = self._local_lens(np.maximum(lens - query_lens, 0))
            own = Table(Paging.of(config), query_lens, local, table.cpu().numpy())
            check_scales_read(config, cache, own, local)

    def _check_step(self, step: MlaStep) -> None:
        """Check the tensors of a step; a table that a map describes is none for several ranks."""
        check_kind("step", step, MlaStep)
        if step.block_table is not None:
            check_kind("block_table", step.block_table, torch.Tensor)
        checks.check_step(self.config, step, self.device)

    def _local_lens(self, lens: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return how many of each row's tokens this rank has, int64 [B]."""
        count = {"world": self._world, "rank": self._rank, "interleave": self._interleave}
        return np.array([local_len(n, **count) for n in lens.tolist()], np.int64)

    def append(self, ckv: torch.Tensor, k_pe: torch.Tensor, cache: Cache) -> None:
        """Write those of the planned step's tokens that this rank caches; parameters are of all T.

        As :meth:`PagedMla.append`, with ``k_pe`` as it will be cached.
        """
        self._mla.append(ckv, k_pe, cache, self.slot_mapping)

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: Cache,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the queries of the planned step to the keys of all ranks.

        Parameters
        ----------
        q_nope : dtype [T, h, R]
            Of this rank's h heads, absorbed.
        q_pe : dtype [T, h, P]
            Rotated.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            This rank's. Any strides, the last one 1.
        out : dtype [T, h, R] or None
        lse : float32 [T, h] or None
            Where to write; ``None`` allocates, in the graph's own memory while one is captured.

        Returns
        -------
        out : dtype [T, h, R]
        lse : float32 [T, h]
            Over the keys of all ranks, in the config's base; (0, -inf) where nothing is seen.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong. Nothing was sent then, and the
            other ranks wait: end the group.
        """
        own, tokens, device = self._own, self._num_tokens, self.device
        shape = (tokens, own.num_heads, own.kv_lora_rank)
        checks.check_queries(own, q_nope, q_pe, tokens, device)
        cache = as_cache(own.cache_format, cache)
        checks.check_cache(own, cache, device)
        if own.stored.inline_scales:
            checks.check_address(cache)
        read = {"q_nope": q_nope, "q_pe": q_pe} | named_tensors(cache)
        out, lse = checks.answers(out, lse, shape, own.dtype, device, read=read)
        if tokens > 0:
            queries = self._exchange.gather(q_nope, q_pe)
            partial, partial_lse = self._exchange.partials(tokens)
            self._mla.attend(*queries, cache, out=partial, lse=partial_lse)
            self._merge.launch(self._exchange.swap(tokens), out=out, lse=lse)
        return out, lse
