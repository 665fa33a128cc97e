"""The history that a reference backend generates, and the distances of other backends to it.

The functions work with any engine for which there is a function of type :data:`Ask`.
"""

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
"""A function that generates greedily.

It takes the prompts and the number of tokens to generate for each. It returns, for each prompt, the
token and the logprobs of each step, and the number of prompt tokens that were cached.
"""


class History(NamedTuple):
    """The prompts, and the tokens and logprobs that the reference backend generated for them."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[Logprobs]]


def prompts(longest: int) -> list[list[int]]:
    """Return prompts of different lengths, up to `longest` tokens.

    They include one token, lengths around multiples of a block, many chunks, and two prompts with a
    common prefix.
    """
    rng = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(count)]

    shared, loop = tokens(700), tokens(12) * 8  # an n-gram drafter can predict a loop
    lengths = (1, 2, 17, 63, 64, 65, 129, 300, 1000, 5000, longest)
    return [*map(tokens, lengths), [*shared, 5, 6, 7], [*shared, 9], loop]


def begin(ask: Ask, many: list[list[int]], tokens: int) -> tuple[History, Followed]:
    """Return a history of `tokens` tokens for each prompt, and a second pass of its engine."""
    answers, _ = ask(many, [tokens] * len(many))
    history = History(
        many,
        [[token for token, _ in answer] for answer in answers],
        [[logprobs for _, logprobs in answer] for answer in answers],
    )
    return history, passes(ask, history, 1)


class Followed(NamedTuple):
    """An engine's logprobs for a history, pass by pass.

    Parameters
    ----------
    numbers : dict
        The distance of each pass from the history's own logprobs, and the number of prompt tokens
        that were cached.
    logprobs : list
        The logprobs of each pass, request and step.
    """

    numbers: dict[str, Any]
    logprobs: list[list[list[Logprobs]]]


def passes(ask: Ask, history: History, count: int) -> Followed:
    """Follow a history `count` times. In the first pass of a new engine no prompt is cached."""
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
    """Return the distance between every two passes of an engine's own backends.

    Parameters
    ----------
    history : History
        Its logprobs count as a pass.
    own : dict
        The passes of each backend, by name.
    """
    many = [("history", history.logprobs)]
    many += [(f"{name} {number}", one) for name in own for number, one in enumerate(own[name])]
    return [
        {"first": first, "second": second, **asdict(distance(history.tokens, one, other))}
        for (first, one), (second, other) in itertools.combinations(many, 2)
    ]


def told(run: dict[str, Any]) -> str:
    """Return the numbers of a run's passes as one line."""
    return "; ".join(
        f"{p['largest']:.4f} {p['median']:.4f} {p['others']:3} {p['gap']:.4f}"
        for p in run["passes"]
    )


def beyond(ours: list[dict[str, Any]], own: list[dict[str, Any]]) -> str:
    """Return how this package's passes exceed the distance of the engine's own, or "" if not.

    The most likely tokens may differ if they tie: if each logprob may have moved by that distance.

    Parameters
    ----------
    ours : list of dict
        The distances of this package's passes from the reference backend.
    own : list of dict
        The distances between every two passes of the engine's own backends.
    """
    most = max(p["largest"] for p in own)
    for word, bound in (("largest", most), ("gap", 2 * most)):
        mine = max(p[word] for p in ours)
        if mine > bound:
            return f"too far: {word} {mine:.4f}, the engine's own backends are {most:.4f} apart"
    return ""
