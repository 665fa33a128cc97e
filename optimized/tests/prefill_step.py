"""Small prefills to test with, and plain float64 attention in NumPy to hold them against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.prefill import PrefillConfig

NOPE, ROPE, V = 32, 16, 32
Lens = tuple[tuple[int, int], ...]  # (keys, queries) of each row


def config(**changes: Any) -> PrefillConfig:
    """Return a small float32 config."""
    defaults = {
        "num_heads": 2,
        "softmax_scale": 0.2,
        "max_rows": 8,
        "max_tokens": 512,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V,
        "dtype": torch.float32,
    }
    return PrefillConfig(**(defaults | changes))


def prefix_sums(lens: list[int]) -> torch.Tensor:
    """Return int32 [B + 1]."""
    return torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)


@dataclass
class PrefillStep:
    """A step whose tensors hold NaN past the last row."""

    config: PrefillConfig
    lens: Lens
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    k_nope: torch.Tensor
    k_pe: torch.Tensor
    v: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q_nope, self.q_pe, self.k_nope, self.k_pe, self.v

    def plan(self, prefill: Prefill) -> None:
        keys, queries = ([row[i] for row in self.lens] for i in (0, 1))
        prefill.plan(prefix_sums(queries), prefix_sums(keys), num_tokens=len(self.q_nope))

    def attend(self, prefill: Prefill | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan and attend on `prefill`, or on a new one, over NaN; return out and lse."""
        prefill = prefill or Prefill(self.config, "cpu")
        self.plan(prefill)
        shape = (*self.q_nope.shape[:2], self.config.v_head_dim)
        out = torch.full(shape, torch.nan, dtype=self.config.dtype)
        return prefill.attend(*self.tensors, out=out, lse=torch.full(shape[:2], torch.nan))


def build(
    *lens: tuple[int, int], padded_tokens: int = 0, spare_keys: int = 0, seed: int = 0,
    **changes: Any,
) -> PrefillStep:  # fmt: skip
    """Build a step with random contents; padding and spare keys are NaN."""
    cfg = config(**changes)
    generator = torch.Generator().manual_seed(seed)
    nope, rope, value = cfg.head_dims

    def lines(alive: int, spare: int, *sizes: int) -> torch.Tensor:
        tensor = torch.randn(alive + spare, *sizes, generator=generator).to(cfg.dtype)
        tensor[alive:] = torch.nan
        return tensor

    keys = sum(row[0] for row in lens), spare_keys
    queries = sum(row[1] for row in lens), padded_tokens
    return PrefillStep(
        cfg,
        lens,
        lines(*queries, cfg.num_heads, nope),
        lines(*queries, cfg.num_heads, rope),
        lines(*keys, cfg.num_heads, nope),
        lines(*keys, rope),
        lines(*keys, cfg.num_heads, value),
    )


def dense(step: PrefillStep) -> tuple[np.ndarray, np.ndarray]:
    """Attend in float64, row by row and head by head (S-4 to S-7)."""
    q_nope, q_pe, k_nope, k_pe, v = (tensor.double().numpy() for tensor in step.tensors)
    tokens, heads = q_nope.shape[:2]
    out, lse = np.zeros((tokens, heads, v.shape[2])), np.full((tokens, heads), -np.inf)
    token = key = 0
    for key_len, query_len in step.lens:
        queries, keys = slice(token, token + query_len), slice(key, key + key_len)
        token, key = token + query_len, key + key_len
        last = np.arange(query_len) + key_len - query_len
        seen = np.arange(key_len)[None, :] <= last[:, None]
        if not step.config.causal:
            seen[:] = True
        alive = seen.any(1)
        for head in range(heads):
            scores = (
                q_nope[queries, head] @ k_nope[keys, head].T + q_pe[queries, head] @ k_pe[keys].T
            )
            scores = np.where(seen, scores * step.config.softmax_scale, -np.inf)[alive]
            if scores.size == 0:
                continue
            peak = scores.max(1, keepdims=True)
            weights = np.exp(scores - peak)
            total = weights.sum(1, keepdims=True)
            out[queries, head][alive] = weights / total @ v[keys, head]
            lse[queries, head][alive] = (peak + np.log(total))[:, 0]
    return out, lse


def assert_close(
    actual: tuple[torch.Tensor, torch.Tensor], step: PrefillStep, tolerance: float = 2e-5
) -> None:
    """Compare out and lse with the dense result, with infinities exactly."""
    for mine, theirs in zip(actual, dense(step), strict=True):
        np.testing.assert_allclose(mine.double().numpy(), theirs, rtol=tolerance, atol=tolerance)
