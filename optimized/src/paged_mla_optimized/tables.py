"""Block tables made on the device from an engine's map of requests to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RequestMap:
    """Where an engine keeps the slot of every token, for ``plan`` in place of a block table.

    Parameters
    ----------
    req_to_token : int32 [requests, tokens]
        Slot of each token of each request; its last axis may have any stride. A block's slots
        follow each other: only the first of each block is read.
    request_ids : int32 or int64 [B]
        Line of each row; never read where ``seq_len`` is 0.

    Notes
    -----
    SGLang's ``req_to_token`` and ``req_pool_indices``. Rules S-1 and S-9.
    """

    req_to_token: torch.Tensor
    request_ids: torch.Tensor
