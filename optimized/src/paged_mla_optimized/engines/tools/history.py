"""What a yardstick generated, and how far others are from it: of any engine that can be asked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple, TypeAlias

from paged_mla_optimized.engines.tools.follow import Logprobs, distance, follow
from paged_mla_optimized.engines.tools.model import VOCAB

Ask: TypeAlias = Callable[
    [list[list[int]], list[int]], tuple[list[list[tuple[int, Logprobs]]], int]
]
"""Prompts and how many tokens to add to each; returns the token and logprobs of each step, and how
many tokens of the prompts were cached. Greedy."""


class History(NamedTuple):
    """What the yardstick generated, and what it thought of each step."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[Logprobs]]


def prompts(longest: int) -> list[list[int]]:
    """Return ragged prompts: one token, edges of blocks, many chunks, two with one beginning."""
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(count)]

    shared, loop = tokens(700), tokens(12) * 8  # a loop is what an n-gram drafter can guess
    lengths = (1, 2, 17, 63, 64, 65, 129, 300, 1000, 5000, longest)
    return [*map(tokens, lengths), [*shared, 5, 6, 7], [*shared, 9], loop]


def begin(ask: Ask, many: list[list[int]], tokens: int) -> tuple[History, Followed]:
    """Return a history of so many tokens for each prompt, and a pass over it by its engine."""
    answers, _ = ask(many, [tokens] * len(many))
    history = History(
        many,
        [[token for token, _ in answer] for answer in answers],
        [[logprobs for _, logprobs in answer] for answer in answers],
    )
    return history, passes(ask, history, 1)


class Followed(NamedTuple):
    """What an engine thought of a history, pass by pass.

    Parameters
    ----------
    numbers : dict
        How far each pass is from the history's own logprobs, and prompt tokens that were cached.
    logprobs : list
        Of each pass, request and step.
    """

    numbers: dict[str, Any]
    logprobs: list[list[list[Logprobs]]]


def passes(ask: Ask, history: History, count: int) -> Followed:
    """Follow a history so many times: the first time of an engine nothing is cached."""
    hits: list[int] = []

    def generate(asked: list[list[int]], tokens: list[int]) -> Any:
        answers, cached = ask(asked, tokens)
        hits.append(cached)
        return answers

    found, cached = [], []
    for _ in range(count):
        hits.clear()
        found.append(follow(generate, history.prompts, history.tokens))
        cached.append(hits[0])
    apart = [asdict(distance(history.tokens, history.logprobs, steps)) for steps in found]
    return Followed({"passes": apart, "cached_tokens": cached}, found)


def pairs(history: History, own: dict[str, list[list[list[Logprobs]]]]) -> list[dict[str, Any]]:
    """Return how far every two passes of an engine's own backends are apart.

    Parameters
    ----------
    history : History
        Its own logprobs are a pass too.
    own : dict
        Passes by backend.
    """
    many = [("history", history.logprobs)]
    many += [(f"{name} {number}", one) for name in own for number, one in enumerate(own[name])]
    return [
        {"first": first, "second": second, **asdict(distance(history.tokens, one, other))}
        for (first, one), (second, other) in itertools.combinations(many, 2)
    ]


def told(run: dict[str, Any]) -> str:
    """Return the numbers of a run's passes in a line."""
    return "; ".join(
        f"{p['largest']:.4f} {p['median']:.4f} {p['others']:3} {p['gap']:.4f}"
        for p in run["passes"]
    )


def beyond(ours: list[dict[str, Any]], own: list[dict[str, Any]]) -> str:
    """Return in what our passes are further from the yardstick than any own two, or nothing.

    Likeliest tokens may differ where they tie: where both logprobs may have moved that far.
    """
    most = max(p["largest"] for p in own)
    for word, bound in (("largest", most), ("gap", 2 * most)):
        mine = max(p[word] for p in ours)
        if mine > bound:
            return f"beyond: {word} {mine:.4f}, the engine's own are {most:.4f} apart"
    return ""
