"""Draws for ``Prefill``: prefix sums that decrease or exceed their tensors."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from machine import DEVICE, FILLINGS, ON_GPU, as_bits, new_guards, watched
from rows import dense_heads
from values import Draw, above, below_zero, in_32_bits

from paged_mla_optimized import Prefill, PrefillConfig

I32 = torch.int32
_KINDS = ("negative", "zero", "too large", "not monotone", "inconsistent")
_OF_BOTH = {"cu_seqlens_q": _KINDS, "cu_seqlens_k": _KINDS}
READS = {"plan": _OF_BOTH, "attend": _OF_BOTH}


def _config(**changes: Any) -> PrefillConfig:
    small: dict[str, Any] = {
        "num_heads": 2,
        "softmax_scale": 0.2,
        "max_rows": 5,
        "max_tokens": 24,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "dtype": torch.float32,
    }
    if ON_GPU:
        small |= {"num_heads": 16, "softmax_scale": 192**-0.5, "max_tokens": 300}
        small |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        small["dtype"] = torch.bfloat16
    return PrefillConfig(**(small | changes))


CONFIGS = {
    "causal": _config(),
    "whole": _config(causal=False),
    "part": _config(causal=False, writes_empty=False),
    "portable": _config(qk_nope_head_dim=32, v_head_dim=16),
}
_TOLERANCE = 3e-2 if ON_GPU else 1e-4
_MOST_KEYS = 2**30  # the plan assumes that no tensor of keys has more


@dataclass(frozen=True)
class Prompt:
    """Rows of queries and keys, and the numbers of both.

    Parameters
    ----------
    config : str
        Key of ``CONFIGS``.
    cu_seqlens_q, cu_seqlens_k : tuple of int [B + 1]
    num_tokens, num_keys : int
    seed : int
    """

    config: str
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    num_tokens: int
    num_keys: int
    seed: int = 0


@dataclass
class _Row:
    tokens: range
    keys: range


@cache
def _prefill(name: str) -> Prefill:
    return Prefill(CONFIGS[name], DEVICE)


def forget() -> None:
    """Drop instances whose buffers a failed launch may have left incomplete."""
    _prefill.cache_clear()


@st.composite
def prompts(draw: Draw, first: tuple[str, str]) -> Prompt:
    """Draw rows that are invalid in the `first` way and possibly in other ways."""
    name = draw(st.sampled_from([*CONFIGS]))
    config = CONFIGS[name]
    rows, left = draw(st.integers(1, config.max_rows)), config.max_tokens
    sums: dict[str, list[int]] = {"cu_seqlens_q": [0], "cu_seqlens_k": [0]}
    for _ in range(rows):
        queries = draw(st.integers(0, left))
        left -= queries
        keys = draw(st.integers(0, 40 if not ON_GPU else 400))
        sums["cu_seqlens_q"].append(sums["cu_seqlens_q"][-1] + queries)
        sums["cu_seqlens_k"].append(sums["cu_seqlens_k"][-1] + keys)
    tokens = sums["cu_seqlens_q"][-1] + draw(st.integers(0, left))
    num_keys = sums["cu_seqlens_k"][-1] + draw(st.integers(0, 3))
    ways = [(value, kind) for value, kinds in _OF_BOTH.items() for kind in kinds]
    for value, kind in [first, *draw(st.lists(st.sampled_from(ways), max_size=2))]:
        given, limit = sums[value], tokens if value == "cu_seqlens_q" else num_keys
        at = draw(st.integers(0, rows))
        match kind:
            case "negative":
                given[at] = draw(below_zero(limit))
            case "zero":
                given[at] = 0
            case "too large":
                given[at] = draw(above(limit))
            case "not monotone":
                given[max(at - 1, 0)], given[at] = given[at], max(given[at - 1], given[at]) + 1
                given[-1] = min(given[-1], given[0])
            case "inconsistent":
                given[:] = [number + draw(st.sampled_from([1, limit])) for number in given]
    return Prompt(
        name,
        tuple(map(in_32_bits, sums["cu_seqlens_q"])),
        tuple(map(in_32_bits, sums["cu_seqlens_k"])),
        tokens,
        num_keys,
        draw(st.integers(0, 9)),
    )


def wrong_in(prompt: Prompt) -> set[tuple[str, str]]:
    """Return pairs of value and kind."""
    found: set[tuple[str, str]] = set()
    for value, given, limit in (
        ("cu_seqlens_q", prompt.cu_seqlens_q, prompt.num_tokens),
        ("cu_seqlens_k", prompt.cu_seqlens_k, prompt.num_keys),
    ):
        lengths = [end - begin for begin, end in itertools.pairwise(given)]
        kinds = {
            "negative": min(given) < 0,
            "zero": 0 in given[1:] or 0 in lengths,
            "too large": max(given) > limit,
            "not monotone": min(lengths) < 0,
            "inconsistent": given[0] != 0,
        }
        found |= {(value, kind) for kind, is_so in kinds.items() if is_so}
    return found


def _rows(prompt: Prompt) -> tuple[list[_Row], list[_Row]]:
    """Return the rows with queries and keys, and the rows with keys past the end of the tensors."""
    config, tokens = CONFIGS[prompt.config], prompt.num_tokens
    rows: list[_Row] = []
    past: list[_Row] = []
    reached = 0
    sums = zip(
        prompt.cu_seqlens_q[:-1],
        prompt.cu_seqlens_q[1:],
        prompt.cu_seqlens_k[:-1],
        prompt.cu_seqlens_k[1:],
        strict=True,
    )
    for number, (begin, end, first_key, last_key) in enumerate(sums):
        reached = max(reached, begin if number else 0)
        is_legal = 0 <= begin <= end and begin == reached
        is_legal &= 0 <= first_key <= last_key <= _MOST_KEYS
        present = range(min(begin, tokens), min(end, tokens)) if is_legal else range(0)
        if not present:
            continue
        cut = end - begin - len(present) if config.causal else 0
        keys = range(first_key, max(last_key - cut, first_key))
        if keys:
            (rows if keys.stop <= prompt.num_keys else past).append(_Row(present, keys))
    return rows, past


def hold(prompt: Prompt) -> None:
    """Attend twice; check legal rows against float64, and that all other tokens are padding."""
    config, (rows, past) = CONFIGS[prompt.config], _rows(prompt)
    generator = torch.Generator().manual_seed(prompt.seed)
    heads, (nope, rope, value) = config.num_heads, config.head_dims
    shapes = {
        "q_nope": (prompt.num_tokens, heads, nope),
        "q_pe": (prompt.num_tokens, heads, rope),
        "k_nope": (prompt.num_keys, heads, nope),
        "k_pe": (prompt.num_keys, rope),
        "v": (prompt.num_keys, heads, value),
    }
    tensors = {
        name: torch.randn(shape, generator=generator).to(config.dtype)
        for name, shape in shapes.items()
    }
    unread = torch.ones(prompt.num_keys, dtype=torch.bool)
    padded = torch.ones(prompt.num_tokens, dtype=torch.bool)
    for row in rows:
        unread[row.keys.start : row.keys.stop] = False
        padded[row.tokens.start : row.tokens.stop] = False
    ran = []
    for filling in FILLINGS:
        guards, placed = new_guards(), {}
        for name, tensor in tensors.items():
            given = tensor.clone()
            given.view(torch.uint8)[padded if name.startswith("q") else unread] = filling
            stride = None
            if name in {"k_nope", "v"} and prompt.seed % 2:  # two parts of one projection
                stride = (heads * (nope + value), nope + value, 1)
            placed[name] = guards.place(name, given, stride=stride)
        blank = torch.empty((prompt.num_tokens, heads, value), dtype=config.dtype)
        blank.view(torch.uint8).fill_(filling)
        blank_lse = torch.empty((prompt.num_tokens, heads))
        blank_lse.view(torch.uint8).fill_(filling)
        out = guards.place("out", blank, written=True)
        lse = guards.place("lse", blank_lse, written=True)
        spread = 1 + prompt.seed % 3
        lengths = [
            guards.place(name, torch.tensor(given, dtype=I32), stride=(spread,))
            for name, given in (
                ("cu_seqlens_q", prompt.cu_seqlens_q),
                ("cu_seqlens_k", prompt.cu_seqlens_k),
            )
        ]
        guards.fill(filling)
        prefill = _prefill(prompt.config)
        with watched():
            prefill.plan(*lengths, num_tokens=prompt.num_tokens)
            prefill.attend(**placed, out=out, lse=lse)
        guards.check()
        written = torch.full((prompt.num_tokens,), config.writes_empty)
        for row in past:  # the plan does not contain them
            written[row.tokens.start : row.tokens.stop] = True
        assert bool((out[padded & written] == 0).all()), "out of padded tokens"
        assert bool((lse[padded & written] == -math.inf).all()), "lse of padded tokens"
        for name, tensor in (("out", out), ("lse", lse)):
            left = as_bits(tensor[padded & ~written]).view(torch.uint8)
            assert bool((left == filling).all()), f"{name} of padded tokens was written"
        ran.append((out.cpu(), lse.cpu()))
    for one, other in zip(*ran, strict=True):
        same = torch.equal(as_bits(one[~padded]), as_bits(other[~padded]))
        assert same, "outputs depend on memory that must not be read"
    for row in rows:
        queries, keys = (
            slice(row.tokens.start, row.tokens.stop),
            slice(row.keys.start, row.keys.stop),
        )
        count, length = len(row.tokens), len(row.keys)
        sees = torch.ones(count, length, dtype=torch.bool)
        if config.causal:
            sees = sees.tril(length - count)
        k_pe = tensors["k_pe"][keys][:, None].expand(-1, heads, -1)
        out, lse = dense_heads(
            config.softmax_scale,
            torch.cat([tensors["q_nope"][queries], tensors["q_pe"][queries]], dim=-1),
            torch.cat([tensors["k_nope"][keys], k_pe], dim=-1),
            tensors["v"][keys],
            sees,
        )
        for name, given, wanted in (("out", ran[1][0], out), ("lse", ran[1][1], lse)):
            torch.testing.assert_close(
                given[queries].double(),
                wanted,
                rtol=_TOLERANCE,
                atol=_TOLERANCE,
                msg=lambda text, name=name: f"{name}: {text}",
            )
