"""The data that ranks exchange in a step: queries go to all ranks, partial results come back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paged_mla_optimized.config.arguments import check_at_least, check_kind
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.operations.merge.lines import line_width, split_lines
from paged_mla_optimized.parallel.heads import heads_of_rank

_all_gather = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # torch 2.13 renamed the function


def link_bytes(config: MlaConfig, world: int, num_tokens: int) -> int:
    """Return the bytes that each rank sends, and receives, in an ``attend``.

    A rank sends the queries of its heads and the partial results of the other rank's heads to
    every other rank. A rank with one head fewer sends a surplus head.

    Parameters
    ----------
    config : MlaConfig
        The config of the group, with the heads of all ranks.
    world : int
        Number of ranks, 1 to ``num_heads``.
    num_tokens : int
        T, >= 0.

    Raises
    ------
    InvalidArgument
        An argument is outside its range.
    """
    check_kind("config", config, MlaConfig)
    check_at_least(0, num_tokens=num_tokens)
    pairs = num_tokens * len(heads_of_rank(config.num_heads, world, 0))
    query = config.kv_lora_rank + config.qk_rope_head_dim
    return (world - 1) * pairs * (query + line_width(config)) * config.dtype.itemsize


class Exchange:
    """Buffers and collectives of one group, with heads first: data of a rank is contiguous.

    Parameters
    ----------
    config : MlaConfig
        The config of the group, with the heads of all ranks.
    group : ProcessGroup
    device : torch.device
    """

    def __init__(self, config: MlaConfig, group: dist.ProcessGroup, device: torch.device) -> None:
        self._config, self._group, self._world = config, group, group.size()
        self._heads = len(heads_of_rank(config.num_heads, self._world, 0))  # that each rank sends
        lines = self._heads * config.max_query_tokens
        self._width = config.kv_lora_rank + config.qk_rope_head_dim
        shapes = (
            (1, self._width),
            (self._world, self._width),
            *[(self._world, line_width(config))] * 2,
        )
        self._own, self._all, self._sent, self._received = (
            torch.zeros(ranks * lines * width, dtype=config.dtype, device=device)
            for ranks, width in shapes
        )

    def gather(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries of all ranks, [T, H, R] and [T, H, P], from those of this rank.

        H includes a surplus head of zeros for each rank that has one head fewer than the first.
        """
        tokens, heads, rank = q_nope.shape
        own = _view(self._own, self._heads, tokens, self._width)
        own[:heads, :, :rank].copy_(q_nope.detach().transpose(0, 1))
        own[:heads, :, rank:].copy_(q_pe.detach().transpose(0, 1))
        own[heads:].zero_()  # surplus heads
        queries = _view(self._all, self._world * self._heads, tokens, self._width)
        _all_gather(queries, own, self._group)
        by_token = queries.transpose(0, 1)
        return by_token[..., :rank], by_token[..., rank:]

    def partials(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers for partial results: out [T, H, R], lse [T, H]; H as in `gather`."""
        out, lse = split_lines(self._config, self._lines(self._sent, num_tokens).flatten(0, 1))
        return out.transpose(0, 1), lse.T

    def swap(self, num_tokens: int) -> torch.Tensor:
        """Exchange partial results; return those of this rank's heads, [world, heads, T, line]."""
        received = self._lines(self._received, num_tokens)
        dist.all_to_all_single(received, self._lines(self._sent, num_tokens), group=self._group)
        return received

    def _lines(self, buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return _view(buffer, self._world, self._heads, num_tokens, line_width(self._config))


def _view(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return the dense beginning of a buffer with the shape `shape`."""
    return buffer[: torch.Size(shape).numel()].view(shape)
