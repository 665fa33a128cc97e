"""Buffers for the masks of draft trees."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.attention import MlaConfig


def mask_buffer(config: MlaConfig, device: torch.device | str) -> torch.Tensor | None:
    """Return a mask buffer for the largest step of a config, or ``None`` without a tree (S-14).

    The buffer has only zeros: uint8 [T, W] for a packed mask, a flat bool tensor for other masks.
    """
    tokens, drafts = config.max_query_tokens, config.max_draft_tokens
    if config.mask == "tree:packed":
        return torch.zeros((tokens, -(-drafts // 8)), dtype=torch.uint8, device=device)
    if not config.is_tree:
        return None
    columns = config.max_model_len if config.mask == "tree:full" else drafts
    return torch.zeros(tokens * columns, dtype=torch.bool, device=device)
