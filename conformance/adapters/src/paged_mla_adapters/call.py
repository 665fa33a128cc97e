"""What a kernel is given in one call, in the forms that kernels take it in.

Everything that a call hands out lies between guard zones: its inputs, the copies that their parts
are, and the buffers for answers, which hold NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from paged_mla_adapters.surroundings import switch
from paged_mla_adapters.surroundings.room import Room
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Problem

WORKSPACE_BYTES = 128 << 20


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return where pieces of some lengths [N] begin, and where the last ends, int32 [N + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


@dataclass(frozen=True, kw_only=True)
class AnyCall:
    """What all calls have: memory.

    Parameters
    ----------
    room : Room
        Where :meth:`buffer` and the parts of inputs get memory from.
    """

    room: Room

    def buffer(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        *,
        fill: float | None = None,
    ) -> torch.Tensor:
        """Return a new tensor for an output or for scratch memory, with guard zones around it.

        Parameters
        ----------
        name : str
            What an error calls it, as "the output".
        shape : tuple of int
        dtype : torch.dtype
        fill : float, optional
            The value of each element before the launch. The default is NaN, or 0 where
            ``PAGED_MLA_SURROUNDINGS`` is ``zeros-in-buffers``.
        """
        if fill is None:
            fill = 0.0 if switch.value() == switch.BUFFERS else torch.nan
        return self.room.empty(name, shape, dtype).fill_(fill)

    def workspace(self, nbytes: int = WORKSPACE_BYTES) -> torch.Tensor:
        """Return scratch memory uint8 [nbytes] of NaN: every byte is 0xFF, or 0 as in a buffer."""
        byte = 0 if switch.value() == switch.BUFFERS else 0xFF
        return self.buffer("the workspace", (nbytes,), torch.uint8, fill=byte)


@dataclass(frozen=True, kw_only=True)
class CacheCall(AnyCall):
    """What calls that read or write a cache have in common.

    Parameters
    ----------
    room : Room
    problem : Problem
    cache : dtype or float8_e4m3fn [num_blocks, block_size, R + P]
        A view; its first two strides may exceed what it carries. What e4m3 stands for is to be
        multiplied by :attr:`cache_scale`.
    """

    problem: Problem
    cache: torch.Tensor

    @property
    def cache_scale(self) -> float:
        """What cached numbers are multiplied by: 1 unless the cache is of 8 bits."""
        return self.problem.cache_scale if self.cache.element_size() == 1 else 1.0

    @cached_property
    def cache_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache in two dense tensors, [num_blocks, block_size, R] and the same with P.

        They are copies. What a kernel writes to them is in the cache once the call is over.
        """
        found = []
        for name, part in zip(("ckv_cache", "kpe_cache"), self._views(), strict=True):
            found.append(self.room.empty(name, tuple(part.shape), part.dtype).copy_(part))
        return found[0], found[1]

    def finish(self) -> None:
        """Put what lies in the parts of the cache, if they were asked for, into the cache."""
        for view, part in zip(self._views(), self.__dict__.get("cache_parts", ()), strict=False):
            view.copy_(part)

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        rank = self.problem.dims.kv_lora_rank
        return self.cache[..., :rank], self.cache[..., rank:]


@dataclass(frozen=True)
class PageLists:
    """The pages of all rows, one row after the other, as kernels over CSR lists take them.

    Parameters
    ----------
    indptr : int32 [N + 1]
        Where the pages of each row begin.
    indices : int32 [pages of all rows]
        Pages of the cache.
    last_page_len : int32 [N]
        Tokens in the last page of each row, 0 of a row without keys.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Call(CacheCall):
    """One launch of an attention kernel: N rows and the T query tokens of all of them.

    N and T are at least 1.

    Parameters
    ----------
    room : Room
    problem : Problem
    cache : dtype or float8_e4m3fn [num_blocks, block_size, R + P]
        See :class:`CacheCall`.
    q : dtype [T, H, R + P]
    cu_seqlens_q : int32 [N + 1]
        Where the tokens of each row begin; as far apart for each row unless the backend declares
        the feature "mixed".
    block_table : int32 [N, M]
    seq_lens : int32 [N]
        0 for rows that pad the step.
    """

    q: torch.Tensor
    cu_seqlens_q: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @cached_property
    def query_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries in two dense tensors, ``q_nope`` [T, H, R] and ``q_pe`` [T, H, P]."""
        rank = self.problem.dims.kv_lora_rank
        q_nope, q_pe = self.q[..., :rank], self.q[..., rank:]
        return self.room.place("q_nope", q_nope), self.room.place("q_pe", q_pe)

    @property
    def slots(self) -> torch.Tensor:
        """The slot of each key, int32 [N, M * block_size]: line n has ``seq_lens[n]`` of them.

        Behind these lie the slots of what else the row's blocks, and its unused entries, name.
        """
        size = self.problem.block_size
        offsets = torch.arange(size, device=self.block_table.device)
        return (self.block_table.long()[..., None] * size + offsets).flatten(1).int()

    def pages(self, page_size: int | None = None) -> torch.Tensor:
        """Return how many pages each row has, int32 [N]; a page is a block by default."""
        return -(-self.seq_lens // (page_size or self.problem.block_size))

    def page_lists(self, page_size: int | None = None) -> PageLists:
        """Return the pages of each row as CSR lists.

        Parameters
        ----------
        page_size : int or None
            1 lists the slot of each key. ``None``, or the block size, lists the rows' blocks.

        Raises
        ------
        InvalidArgument
            A page has another size.
        """
        block_size = self.problem.block_size
        size = block_size if page_size is None else page_size
        if size not in {1, block_size}:
            raise InvalidArgument("page_size", size, f"1 or the block size, {block_size}")
        entries = self.block_table if size == block_size else self.slots
        pages = self.pages(size)
        number = torch.arange(entries.shape[1], device=entries.device)
        return PageLists(
            indptr=starts_of(pages),
            indices=entries[number < pages[:, None]],
            last_page_len=self.seq_lens - (pages - 1).clamp(min=0) * size,
        )

    def by_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what belongs to tokens, [T, ...], as [N, T / N, ...]: of rows of one length."""
        return tokens.view(len(self.seq_lens), -1, *tokens.shape[1:])

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers full of NaN: the output, dtype [T, H, R], and the lse, float32 [T, H]."""
        shape = (*self.q.shape[:2], self.problem.dims.kv_lora_rank)
        return (
            self.buffer("the output", shape, self.q.dtype),
            self.buffer("the lse", shape[:2]),
        )


@dataclass(frozen=True, kw_only=True)
class AppendCall(CacheCall):
    """One launch of a writer: T tokens, at least 1.

    Parameters
    ----------
    room : Room
    problem : Problem
    cache : dtype or float8_e4m3fn [num_blocks, block_size, R + P]
        See :class:`CacheCall`; the call writes it.
    ckv : dtype [T, R]
    k_pe : dtype [T, P]
    slot_mapping : int64 [T]
        -1 for tokens that are not stored.
    """

    ckv: torch.Tensor
    k_pe: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class MergeCall(AnyCall):
    """One launch of a merge: two partial answers of T query tokens over other keys.

    Parameters
    ----------
    room : Room
    out_a, out_b : float32 [T, H, R]
    lse_a, lse_b : float32 [T, H]
        -inf where a partial answer is over no key.
    """

    out_a: torch.Tensor
    lse_a: torch.Tensor
    out_b: torch.Tensor
    lse_b: torch.Tensor
