"""Paged MLA attention in plain PyTorch, with which solutions are compared."""

import math

import torch


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    *,
    qo_indptr: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and its lse in base 2, with products and sums in float32.

    Without `qo_indptr` each row has one query token, and without `kv_last_page_len` all pages are
    full. The last query token of a row is at the position of its last key. Only keys of the rows
    are read.
    """
    size, pages = ckv_cache.shape[1], kv_indptr.tolist()
    queries = list(range(len(pages))) if qo_indptr is None else qo_indptr.tolist()
    spare = [0] * len(pages)
    if kv_last_page_len is not None:
        spare = (size - kv_last_page_len).tolist()
    output = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf, device=q_nope.device)
    for row in range(len(pages) - 1):
        first, last = queries[row : row + 2]
        blocks = kv_indices[pages[row] : pages[row + 1]].long()
        keys = len(blocks) * size - spare[row]
        if first == last or len(blocks) == 0:
            continue
        ckv, kpe = (cache[blocks].flatten(0, 1)[:keys].float() for cache in (ckv_cache, kpe_cache))
        scores = q_nope[first:last].float() @ ckv.T + q_pe[first:last].float() @ kpe.T
        position = torch.arange(keys - (last - first), keys, device=scores.device)  # of each query
        is_later = torch.arange(keys, device=scores.device) > position[:, None]
        scores = (sm_scale * scores).masked_fill(is_later[:, None], -math.inf)
        lse[first:last] = torch.logsumexp(scores, -1) / math.log(2.0)
        output[first:last] = (torch.softmax(scores, -1) @ ckv).to(output.dtype)
    return output, lse
