"""Functions that make page lists from block tables: an attention over the lists tests them."""

from __future__ import annotations

from typing import Any

import torch

from paged_mla_adapters.call import Call
from paged_mla_adapters.judge.arguments import Arguments
from paged_mla_adapters.judge.claims import Claims

PARTS = ("kv_indptr", "kv_indices", "kv_last_page_len")
LAYOUTS = ("[blocks, size, D]", "[slots, D]")  # of caches; the lists have blocks, or slots
_UNWRITTEN = -(2**31) + 1  # the initial value of lists that are passed: no legal index or length


class WrongLists(AssertionError):
    """A range or a page is outside its bounds, or a row has too few pages or keys."""


class CsrArguments(Arguments):
    """The arguments of a function that makes page lists, by role.

    Parameters
    ----------
    call : Call
    claims : Claims
    """

    def __init__(self, call: Call, claims: Claims) -> None:
        super().__init__()
        self._call, self._page = call, page_of(call, claims)

    def _block_table(self) -> torch.Tensor:
        return self._call.block_table

    def _seq_lens(self) -> torch.Tensor:
        return self._call.seq_lens

    def _block_size(self) -> int:
        return self._call.problem.block_size

    def _num_rows(self) -> int:
        return len(self._call.seq_lens)

    def _max_seq_len(self) -> int:
        return int(self._call.seq_lens.max())

    def _kv_indptr(self) -> torch.Tensor:
        return self._list("kv_indptr", len(self._call.seq_lens) + 1)

    def _kv_indices(self) -> torch.Tensor:
        return self._list("kv_indices", int(self._call.pages(self._page).sum()))

    def _kv_last_page_len(self) -> torch.Tensor:
        return self._list("kv_last_page_len", len(self._call.seq_lens))

    def _list(self, name: str, length: int) -> torch.Tensor:
        return self._call.buffer(name, (length,), torch.int32, fill=_UNWRITTEN)

    def lists(self, result: Any) -> dict[str, torch.Tensor]:
        """Return the lists that a function returned or wrote, by role.

        Raises
        ------
        TypeError
            ``kv_indptr`` or ``kv_indices`` was neither returned nor passed to the function.
        """
        found = {name: self._made[name] for name in PARTS if name in self._made}
        if isinstance(result, dict):
            found |= {name: result[name] for name in PARTS if name in result}
        elif isinstance(result, tuple | list):
            found |= dict(zip(PARTS, result, strict=False))
        if not {"kv_indptr", "kv_indices"} <= set(found):
            kind = type(result).__name__
            raise TypeError(
                f"the function returned a {kind}; allowed: kv_indptr and kv_indices, as results or "
                "as parameters that it writes"
            )
        return found


def page_of(call: Call, claims: Claims) -> int:
    """Return the number of tokens in a page, to which an entry of ``kv_indices`` points."""
    return 1 if claims.cache == LAYOUTS[1] else call.problem.block_size


def attend(
    call: Call, lists: dict[str, torch.Tensor], claims: Claims
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over the pages of the lists, in float32.

    Returns
    -------
    out : dtype of the queries [T, H, R]
    lse : float32 [T, H]

    Raises
    ------
    WrongLists
        A row's range is outside the list, a page is outside the cache, or a row has fewer pages
        than its keys need or a negative number of keys.
    """
    rank, size = call.problem.dims.kv_lora_rank, page_of(call, claims)
    cache = call.cache if size > 1 else call.cache.flatten(0, 1).unsqueeze(1)
    out = torch.zeros(*call.q.shape[:2], rank, device=call.q.device)
    lse = torch.full(call.q.shape[:2], -torch.inf, device=call.q.device)
    starts, indptr = call.cu_seqlens_q.tolist(), lists["kv_indptr"].tolist()
    lens, indices = _lens(call, lists, size), lists["kv_indices"]
    for b, keys in enumerate(lens):
        pages = _pages(b, indptr, indices, len(cache))
        if len(pages) * size < keys:
            raise WrongLists(f"row {b} has {len(pages)} pages of {size} tokens, but {keys} keys")
        begin, end = starts[b : b + 2]
        if keys == 0 or begin == end:
            continue
        cached = cache[pages].flatten(0, 1)[:keys].float()
        scores = call.problem.softmax_scale * call.q[begin:end].float() @ cached.T
        if call.problem.mask == "causal":
            ahead = torch.ones(end - begin, keys, device=out.device).triu(keys - (end - begin) + 1)
            scores = scores.masked_fill(ahead.bool()[:, None], -torch.inf)
        lse[begin:end] = torch.logsumexp(scores, -1)
        out[begin:end] = torch.softmax(scores, -1).nan_to_num() @ cached[:, :rank]
    return out.to(call.q.dtype), lse


def _lens(call: Call, lists: dict[str, torch.Tensor], size: int) -> list[int]:
    """Return the number of keys of each row, from ``kv_last_page_len`` if the lists have it."""
    lens, last = call.seq_lens, lists.get("kv_last_page_len")
    if last is not None:
        full = (lists["kv_indptr"].diff() - 1) * size
        lens = torch.where(lens > 0, full + last, 0)
    known: list[int] = lens.tolist()
    if min(known, default=0) < 0:
        raise WrongLists(f"row {known.index(min(known))} has {min(known)} keys; allowed: >= 0")
    return known


def _pages(row: int, indptr: list[int], indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the pages of a row, int64."""
    first, last = indptr[row : row + 2]
    if not 0 <= first <= last <= len(indices):
        raise WrongLists(
            f"kv_indptr: row {row} has entries {first} to {last}, but kv_indices has {len(indices)}"
        )
    pages = indices[first:last].long()
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < blocks:
        wrong = pages[(pages < 0) | (pages >= blocks)][0]
        raise WrongLists(f"kv_indices: row {row} has page {wrong}; allowed: 0 to {blocks - 1}")
    return pages
