"""Masks of draft trees in the spellings of a config."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.attention import MlaConfig


def mask_buffer(config: MlaConfig, device: torch.device | str) -> torch.Tensor | None:
    """Return room for the masks of a config's largest step, in its spelling (S-14)."""
    tokens, drafts = config.max_query_tokens, config.max_draft_tokens
    if config.mask == "tree:packed":
        return torch.zeros((tokens, -(-drafts // 8)), dtype=torch.uint8, device=device)
    if not config.is_tree:
        return None
    columns = config.max_model_len if config.mask == "tree:full" else drafts
    return torch.zeros(tokens * columns, dtype=torch.bool, device=device)
