"""Compute an engine's logprobs for a given history, and the distance between two engines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Logprobs: TypeAlias = dict[int, float]
"""The logprobs of the most likely tokens of a step and of the token that was generated."""

Generate: TypeAlias = Callable[[list[list[int]], list[int]], list[list[tuple[int, Logprobs]]]]
"""A function that generates greedily.

It takes the prompts and the number of tokens to generate for each. It returns, for each prompt, the
token and the logprobs of each step.
"""


def follow(
    generate: Generate, prompts: Sequence[list[int]], histories: Sequence[list[int]]
) -> list[list[Logprobs]]:
    """Return an engine's logprobs at every step of the histories.

    Greedy engines generate different tokens where two tokens nearly tie. If a request differs from
    its history, the function generates again from the next step, with the prompt and the history so
    far as the new prompt. Every step therefore has the same past, with any speculation, CUDA graphs
    or preemption of the engine.

    Parameters
    ----------
    generate : callable
        A function that generates greedily.
    prompts, histories : sequence of list of int
        The prompt and the history of each request.

    Returns
    -------
    list of list of dict
        The logprobs of each request and step.
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
    """The distance between two engines at the same histories.

    Parameters
    ----------
    steps : int
        The number of compared steps.
    largest, median : float
        The largest and the median difference of the logprob of the history's token, in nats. A
        difference is infinite if an engine does not return a logprob for the token, or returns NaN.
    others : int
        The number of steps whose most likely token differs.
    gap : float
        The largest difference, at these steps, between the first engine's logprobs of its own most
        likely token and of the second engine's most likely token.
    equal : int
        The number of steps whose logprobs of the history's token are bit-equal.
    """

    steps: int
    largest: float
    median: float
    others: int
    gap: float
    equal: int


def between(one: Logprobs, two: Logprobs, token: int) -> float:
    """Return the difference of a token's logprobs in nats; infinite if one is missing or NaN."""
    difference = abs(one.get(token, math.nan) - two.get(token, math.nan))
    return math.inf if math.isnan(difference) else difference


def distance(
    histories: Sequence[list[int]],
    first: Sequence[list[Logprobs]],
    second: Sequence[list[Logprobs]],
) -> Distance:
    """Return the distance of the second engine from the first."""
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
