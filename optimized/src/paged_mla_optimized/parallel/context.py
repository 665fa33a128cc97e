"""Paged MLA with a cache that is divided over the ranks of a group (rule S-18)."""

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

_TABLE_STRIDES = (1, 16, 17)  # Triton specializes on 1 and on multiples of 16


class ContextParallelMla(Uncopied):
    """Paged MLA of one rank: it caches a part of the tokens, and returns the outputs of its heads.

    Every rank makes the same calls with the same lengths and block table, and with queries of its
    own heads (:func:`~paged_mla_optimized.parallel.heads.heads_of_rank`). All ranks receive all
    queries. Each rank attends them to its keys, and sends the partial results to the rank of their
    heads, which merges them by their lse. A rank without a key of a row does not affect its output.

    The constructor allocates every buffer, except the outputs of an ``attend`` without `out` and
    `lse`. Nothing waits for the device. Therefore CUDA graphs can capture a step on every rank,
    after one step has run eagerly.

    Parameters
    ----------
    config : MlaConfig
        The config of the group: all heads and the lengths of whole rows; causal and without a rope.
        Every token is a separate row on each rank, so ``max_query_tokens`` is at most 32766.
        ``num_heads`` is at most the largest multiple of the number of ranks up to 128.
        ``block_size`` counts the tokens of a block on one rank, so a block of the table has
        ``block_size * world`` tokens. ``reserved_slot`` is a slot of each rank.
    group : ProcessGroup or None
        The ranks; ``None`` uses the default group.
    device : str or torch.device
    interleave : int
        Number of consecutive tokens that one rank gets, a divisor of ``block_size``.

    Raises
    ------
    InvalidArgument
        There is no group or this process is not a member of it, there are more ranks than heads,
        or a rank cannot implement the config with a part of the keys.
    Unsupported
        No kernel runs on `device`, or the dtype is bfloat16 in Triton's interpreter.
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
            raise InvalidArgument(
                "group", None, "a group, or None after torch.distributed is initialized"
            )
        check_kind("group", group, dist.ProcessGroup)  # torch uses an int for non-members
        world, rank = group.size(), group.rank()
        self.config = config
        self.heads = heads_of_rank(config.num_heads, world, rank)
        """The heads of this rank, among all heads."""
        self._own = replace(config, num_heads=len(self.heads))
        local = local_config(config, world=world, interleave=interleave)
        self._mla = PagedMla(local, device)
        self._mla.writes_elsewhere()  # its rows are single queries, and slots are passed to it
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
        """Slots on this rank, int64 [T]; -1 for tokens of other ranks and for padding."""
        return self._shard.slot_mapping[: self._num_tokens]

    @property
    def local_lens(self) -> torch.Tensor:
        """Number of this rank's keys that each query of the planned step sees, int32 [T]."""
        return self._shard.local_lens[: self._num_tokens]

    def new_cache(self, num_blocks: int) -> LatentCache:
        """Return this rank's cache of one layer, as :meth:`PagedMla.new_cache` does.

        A block has ``block_size`` tokens of this rank; all ranks need the same number of blocks.
        """
        return empty_cache(self.config, num_blocks, self.device)

    def warm_up(self, cache: Cache) -> None:
        """Compile every kernel of a step, as :meth:`PagedMla.warm_up` does; all ranks must call it.

        Kernels are compiled for block tables of any width, and for outputs that :meth:`attend`
        allocates. The cache is not written. The planned step is lost: call :meth:`plan` again.

        Parameters
        ----------
        cache
            As for :meth:`attend`.

        Raises
        ------
        InvalidArgument
            The errors of :meth:`attend`.
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
        """Plan a step with three kernel launches; lengths are read on the device only.

        Parameters
        ----------
        step : MlaStep
            The same on all ranks, without a mask: lengths of whole rows, and a block table, which
            only this method reads.

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
        """Check the *values* of a step against the rules; for debugging, since it synchronizes.

        The method does not communicate, so a rank may call it alone.

        Parameters
        ----------
        step : MlaStep
            As for :meth:`plan`.
        num_blocks, cache
            As for :meth:`PagedMla.check`, of this rank; scales of this rank's tokens are checked.

        Raises
        ------
        InvalidArgument
            An argument breaks a rule; the error names the argument.
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
        """Check the tensors of a step; request maps are not supported here."""
        check_kind("step", step, MlaStep)
        if step.block_table is not None:
            check_kind("block_table", step.block_table, torch.Tensor)
        checks.check_step(self.config, step, self.device)

    def _local_lens(self, lens: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the number of each row's tokens that this rank caches, int64 [B]."""
        count = {"world": self._world, "rank": self._rank, "interleave": self._interleave}
        return np.array([local_len(n, **count) for n in lens.tolist()], np.int64)

    def append(self, ckv: torch.Tensor, k_pe: torch.Tensor, cache: Cache) -> None:
        """Write the planned step's tokens that this rank caches; the arguments have all T tokens.

        It works like :meth:`PagedMla.append`; ``k_pe`` must be rotated already.
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
            Absorbed queries of this rank's h heads.
        q_pe : dtype [T, h, P]
            Rotated.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            The cache of this rank. Any strides, but the last stride is 1.
        out : dtype [T, h, R] or None
        lse : float32 [T, h] or None
            Where to write the outputs. ``None`` allocates; during a graph capture, the memory
            belongs to the graph.

        Returns
        -------
        out : dtype [T, h, R]
        lse : float32 [T, h]
            Over the keys of all ranks, in the config's base; (0, -inf) without visible keys.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong. This rank has sent nothing
            then, and the other ranks wait for it: end the group.
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
