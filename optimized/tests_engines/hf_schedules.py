"""Schedules of forwards over a paged cache, each token's logits held against the library's own."""

from __future__ import annotations

import copy
import itertools

import torch
from hf_models import PAD, VOCAB

from paged_mla_optimized.engines.transformers import PagedMlaCache


class Trial:
    """Requests in rows of one cache; the logits of each forward are compared at once.

    A step adds columns; a row with fewer new tokens is padded before them, as the library pads.
    """

    def __init__(
        self, model, pool, requests: list[list[int]], expected: list[torch.Tensor], scale: int
    ) -> None:
        self.model, self.pool = model, pool
        self.requests, self.expected, self.scale = requests, expected, scale
        self.cache = PagedMlaCache(pool)
        self.done = [0] * len(requests)
        self.mask = torch.zeros((len(requests), 0), dtype=torch.long)
        self.difference = 0.0
        self.compared = 0

    def step(self, counts: list[int]) -> None:
        """Feed so many tokens of each row."""
        new = [
            request[first : first + count]
            for request, first, count in zip(self.requests, self.done, counts, strict=True)
        ]
        logits = self._forward(new)
        for row, count in enumerate(counts):
            first = self.done[row]
            self._compare(logits[row, logits.shape[1] - count :], row, first)
            self.done[row] = first + count

    def verify(self, drafts: int, right: int) -> None:
        """Feed a token and drafts, of which so many are right, and crop the others."""
        new = []
        for request, first in zip(self.requests, self.done, strict=True):
            wrong = [1 + (token % (VOCAB - 1)) for token in request[first + 1 : first + 1 + drafts]]
            kept = request[first : first + 1 + right]
            new.append(kept + wrong[right:])
        logits = self._forward(new)
        for row, first in enumerate(self.done):
            self._compare(logits[row, : 1 + right], row, first)
            self.done[row] = first + 1 + right
        self.cache.crop(right - drafts)
        self.mask = self.mask[:, : self.mask.shape[1] - (drafts - right)]

    def select(self, rows: list[int]) -> None:
        """Let rows go on from others, as beams do; those have the same tokens so far."""
        for row, other in enumerate(rows):
            done = self.done[other]
            assert self.requests[row][:done] == self.requests[other][:done]
        self.cache.reorder_cache(torch.tensor(rows))
        self.done, self.mask = [self.done[row] for row in rows], self.mask[rows]

    def fork(self) -> None:
        """Go on in a copy; what is written to the first cache from now on must not be seen."""
        other, self.cache = self.cache, copy.deepcopy(self.cache)
        held = self.mask
        self._forward([[7] * 3 for _ in self.requests], other)
        self.mask = held

    def _forward(self, new: list[list[int]], cache: PagedMlaCache | None = None) -> torch.Tensor:
        columns = max(map(len, new))
        padded = [[PAD] * (columns - len(tokens)) + tokens for tokens in new]
        is_token = [[0] * (columns - len(tokens)) + [1] * len(tokens) for tokens in new]
        self.mask = torch.cat([self.mask, torch.tensor(is_token)], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -columns:]
        device = self.model.device
        with torch.no_grad():
            return self.model(
                torch.tensor(padded, device=device),
                attention_mask=self.mask.to(device),
                position_ids=positions.to(device),
                past_key_values=self.cache if cache is None else cache,
            ).logits

    def _compare(self, logits: torch.Tensor, row: int, first: int) -> None:
        expected = self.expected[row][first : first + len(logits)]
        assert logits.isfinite().all()
        if len(logits) > 0:
            self.difference = max(self.difference, (logits - expected).abs().max().item())
        self.compared += len(logits)


def one_piece(trial: Trial) -> None:
    trial.step([len(request) for request in trial.requests])


def chunks(trial: Trial) -> None:
    """Chunks of many sizes, of which some rows have none."""
    for size in itertools.cycle((7 * trial.scale, 1, 16 * trial.scale, 3)):
        left = [
            len(request) - done for request, done in zip(trial.requests, trial.done, strict=True)
        ]
        if not any(left):
            return
        trial.step([min(size, rest) for rest in left])


def decode(trial: Trial) -> None:
    """Prompts, then a token a step."""
    _prompts(trial, 5)
    for _ in range(5):
        trial.step([1] * len(trial.requests))


def verify(trial: Trial) -> None:
    """Prompts, then drafts of which none, some and all are right."""
    _prompts(trial, 9)
    for drafts, right in ((3, 0), (3, 3), (2, 1)):
        trial.verify(drafts, right)
    trial.step([1] * len(trial.requests))


def beams(trial: Trial) -> None:
    """Rows that begin alike change places, share blocks, and part."""
    trial.step([SHARED * trial.scale] * len(trial.requests))
    trial.select([0] * len(trial.requests))
    for _ in range(3):
        trial.step([1] * len(trial.requests))


def prefix(trial: Trial) -> None:
    """A prefix in one cache, continued in a copy with different lengths, with padding between."""
    trial.step([SHARED * trial.scale] * len(trial.requests))
    trial.fork()
    trial.step([6 - row % 3 for row in range(len(trial.requests))])
    trial.step([1] * len(trial.requests))


ROWS = 3
SHARED = 21
"""Tokens that all requests begin with in the schedules that share them."""
OF_ALIKE = {"beams", "prefix"}
SCHEDULES = {f.__name__: f for f in (one_piece, chunks, decode, verify, beams, prefix)}


def requests_of(scale: int, *, are_alike: bool) -> list[list[int]]:
    """Return requests for :data:`ROWS` rows, ragged or alike at first."""
    generator = torch.Generator().manual_seed(2)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=generator).tolist()

    if are_alike:
        common = tokens(SHARED * scale)
        return [common + tokens(8) for _ in range(ROWS)]
    return [tokens(length * scale) for length in (37, 14, 60)]


def _prompts(trial: Trial, rest: int) -> None:
    """Feed all but the last `rest` tokens of each request, of lengths that differ."""
    trial.step([len(request) - rest for request in trial.requests])
