"""The arguments of one call of a kernel, in the forms that kernels take.

All tensors of a call are between guard zones: its inputs, copies of parts of them, and buffers for
outputs, which are full of NaN.
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
    """Return the start of each piece and the end of the last, int32 [N + 1], for lengths [N]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


@dataclass(frozen=True, kw_only=True)
class AnyCall:
    """The base of all calls; it allocates memory.

    Parameters
    ----------
    room : Room
        The allocator of :meth:`buffer` and of the parts of inputs.
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
            The name of the tensor in errors, for example "the output".
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
    """The base of calls that read or write a cache.

    Parameters
    ----------
    room : Room
    problem : Problem
    cache : dtype or float8_e4m3fn [num_blocks, block_size, R + P]
        A view, which may have gaps between tokens and between blocks. A cached number is an
        element multiplied by :attr:`cache_scale`.
    """

    problem: Problem
    cache: torch.Tensor

    @property
    def cache_scale(self) -> float:
        """The factor of the cache's elements; 1 unless the elements have 8 bits."""
        return self.problem.cache_scale if self.cache.element_size() == 1 else 1.0

    @cached_property
    def cache_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache as two contiguous tensors [num_blocks, block_size, R] and [.., P].

        They are copies. :meth:`finish` copies them to the cache after the call.
        """
        found = []
        for name, part in zip(("ckv_cache", "kpe_cache"), self._views(), strict=True):
            found.append(self.room.empty(name, tuple(part.shape), part.dtype).copy_(part))
        return found[0], found[1]

    def finish(self) -> None:
        """Copy :attr:`cache_parts` to the cache if they were used."""
        for view, part in zip(self._views(), self.__dict__.get("cache_parts", ()), strict=False):
            view.copy_(part)

    def _views(self) -> tuple[torch.Tensor, torch.Tensor]:
        rank = self.problem.dims.kv_lora_rank
        return self.cache[..., :rank], self.cache[..., rank:]


@dataclass(frozen=True)
class PageLists:
    """The pages of all rows as CSR lists, one row after the other.

    Parameters
    ----------
    indptr : int32 [N + 1]
        The start of each row's pages in `indices`, and the end of the last row.
    indices : int32 [pages of all rows]
        The numbers of the pages in the cache.
    last_page_len : int32 [N]
        The number of tokens in the last page of each row; 0 for a row without keys.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Call(CacheCall):
    """One call of an attention kernel, with N rows and T query tokens in all rows together.

    N and T are at least 1.

    Parameters
    ----------
    room : Room
    problem : Problem
    cache : dtype or float8_e4m3fn [num_blocks, block_size, R + P]
        See :class:`CacheCall`.
    q : dtype [T, H, R + P]
    cu_seqlens_q : int32 [N + 1]
        The start of each row's tokens in `q`. All rows have the same number of tokens unless the
        backend declares the feature "mixed".
    block_table : int32 [N, M]
    seq_lens : int32 [N]
        The number of keys of each row; 0 for padding.
    """

    q: torch.Tensor
    cu_seqlens_q: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @cached_property
    def query_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries as two contiguous copies, ``q_nope`` [T, H, R] and ``q_pe`` [T, H, P]."""
        rank = self.problem.dims.kv_lora_rank
        q_nope, q_pe = self.q[..., :rank], self.q[..., rank:]
        return self.room.place("q_nope", q_nope), self.room.place("q_pe", q_pe)

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the keys of each row, int32 [N, M * block_size].

        Line n starts with the slots of the ``seq_lens[n]`` keys of row n. The rest of the line has
        the other slots of the blocks in the row's line of the block table.
        """
        size = self.problem.block_size
        offsets = torch.arange(size, device=self.block_table.device)
        return (self.block_table.long()[..., None] * size + offsets).flatten(1).int()

    def pages(self, page_size: int | None = None) -> torch.Tensor:
        """Return the number of pages of each row, int32 [N]; by default a page is a block."""
        return -(-self.seq_lens // (page_size or self.problem.block_size))

    def page_lists(self, page_size: int | None = None) -> PageLists:
        """Return the pages of each row as CSR lists.

        Parameters
        ----------
        page_size : int or None
            With 1 the lists have the slot of each key. With ``None`` or the block size they have
            the blocks of each row.

        Raises
        ------
        InvalidArgument
            The page size is neither 1 nor the block size.
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
        """Return a view [N, T / N, ...] of [T, ...]; all rows have the same number of tokens."""
        return tokens.view(len(self.seq_lens), -1, *tokens.shape[1:])

    def answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return buffers full of NaN for the output, dtype [T, H, R], and lse, float32 [T, H]."""
        shape = (*self.q.shape[:2], self.problem.dims.kv_lora_rank)
        return (
            self.buffer("the output", shape, self.q.dtype),
            self.buffer("the lse", shape[:2]),
        )


@dataclass(frozen=True, kw_only=True)
class AppendCall(CacheCall):
    """One call of a function that writes T tokens to a cache, with T at least 1.

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
    """One call of a merge of two partial results of T query tokens over different keys.

    Parameters
    ----------
    room : Room
    out_a, out_b : float32 [T, H, R]
    lse_a, lse_b : float32 [T, H]
        -inf where a partial result covers no key.
    """

    out_a: torch.Tensor
    lse_a: torch.Tensor
    out_b: torch.Tensor
    lse_b: torch.Tensor
