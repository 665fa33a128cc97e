"""What an engine says of a given history, token by token, and how far two engines are apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Logprobs: TypeAlias = dict[int, float]
"""Of the likeliest tokens of a step, and of the one that was taken."""

Generate: TypeAlias = Callable[[list[list[int]], list[int]], list[list[tuple[int, Logprobs]]]]
"""Prompts and how many tokens to add to each; returns the token and logprobs of each step."""


def follow(
    generate: Generate, prompts: Sequence[list[int]], histories: Sequence[list[int]]
) -> list[list[Logprobs]]:
    """Return an engine's logprobs at every step of the histories.

    Greedy engines part where two tokens nearly tie. Each request that parts from its history is
    asked again from there on, with what went before as its prompt: so every step has the same
    past, whatever speculation, graphs or preemption the engine works with.

    Parameters
    ----------
    generate : callable
        Greedy.
    prompts, histories : sequence of list of int
        One of each for every request.
    """
    found: list[list[Logprobs]] = [[] for _ in prompts]
    while pending := [r for r, steps in enumerate(found) if len(steps) < len(histories[r])]:
        asked = [prompts[r] + histories[r][: len(found[r])] for r in pending]
        answers = generate(asked, [len(histories[r]) - len(found[r]) for r in pending])
        for r, answer in zip(pending, answers, strict=True):
            for token, logprobs in answer:
                history_token = histories[r][len(found[r])]
                found[r].append(logprobs)
                if token != history_token:
                    break
    return found


@dataclass(frozen=True)
class Distance:
    """How far two engines are apart at the same histories.

    Parameters
    ----------
    steps : int
    largest, median : float
        Of the differences of the logprob of the history's token, nats; infinite where one engine
        does not have it among its likeliest, or has NaN for it.
    others : int
        Steps whose likeliest token differs.
    gap : float
        At those: how far below its own likeliest token the first engine has the second's, at most.
    equal : int
        Steps whose logprobs are equal to the last bit.
    """

    steps: int
    largest: float
    median: float
    others: int
    gap: float
    equal: int


def between(one: Logprobs, two: Logprobs, token: int) -> float:
    """Return how far the logprobs of a token are apart, nats; infinite if one is no number."""
    difference = abs(one.get(token, math.nan) - two.get(token, math.nan))
    return math.inf if math.isnan(difference) else difference


def distance(
    histories: Sequence[list[int]],
    first: Sequence[list[Logprobs]],
    second: Sequence[list[Logprobs]],
) -> Distance:
    """Return how far the second engine is from the first."""
    apart, gaps = [], []
    for history, ones, twos in zip(histories, first, second, strict=True):
        for token, one, two in zip(history, ones, twos, strict=True):
            apart.append(between(one, two, token))
            best, other = max(one, key=one.__getitem__), max(two, key=two.__getitem__)
            if best != other:
                gaps.append(one[best] - one.get(other, -math.inf))
    return Distance(
        steps=len(apart),
        largest=max(apart),
        median=statistics.median(apart),
        others=len(gaps),
        gap=max(gaps, default=0.0),
        equal=sum(difference == 0 for difference in apart),
    )
