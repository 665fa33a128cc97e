"""Situations that have caused errors in engines, and how often a schedule reached each of them."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum


class Situation(StrEnum):
    """A situation that may occur in a step; the value is its name in the coverage table."""

    FRESH_CHUNK = "first chunk of a prompt"
    CONTINUATION = "continuation chunk"
    CONTINUATION_OF_ONE = "continuation chunk of 1 token"
    CONTINUATION_BESIDE_DECODE = "continuation chunk together with a decode row"
    DECODE_FIRST = "mixed step, decode rows first"
    PREFILL_FIRST = "mixed step, a prefill row before a decode row"
    HIT_BEFORE_EDGE = "hit, prompt ends 1 before a block edge"
    HIT_AT_EDGE = "hit, prompt ends at a block edge"
    HIT_AFTER_EDGE = "hit, prompt ends 1 after a block edge"
    FULL_PROMPT_HIT = "hit of a full prompt, its last block computed again"
    HIT_ON_LIVE = "hit on a block that another row uses"
    OTHER_KEYS = "known tokens, other extra keys: no hit"
    EVICTION = "eviction"
    EVICTION_OF_SHARED = "eviction of a formerly shared block"
    PREEMPTED = "preempted"
    RESUMED = "preempted request resumed"
    RESUMED_WITH_HIT = "resumed on its own cached blocks"
    ABORTED_WAITING = "abort while waiting"
    ABORTED_RUNNING = "abort while running"
    CHAIN_NONE = "chain, no draft accepted"
    CHAIN_SOME = "chain, some drafts accepted"
    CHAIN_ALL = "chain, all drafts accepted"
    CHAIN_BESIDE_PREFILL = "chain together with a prefill row"
    TREE_NONE = "tree, no draft accepted"
    TREE_LENGTHS = "trees of one step accept branches of two lengths"
    TREE_NOT_CONTIGUOUS = "tree, accepted nodes not contiguous"
    DRAFT_SHARED_BLOCK = "draft branches share a full block"
    DRAFT_NO_FULL_BLOCK = "draft branches of a prefix below one block"
    DRAFT_PARTIAL_BLOCK = "draft branches continue a partial block"
    WINDOW_PAST_ACCEPTED = "window reaches past accepted tokens"
    WINDOW_ALL_ACCEPTED = "window of accepted tokens only"
    ENDS_IN_DRAFTS = "request ends inside its drafts"
    PADDED_ROWS = "padded rows"
    PADDED_TOKENS = "padded tokens"
    BUCKET_GROWS = "next graph is larger"
    BUCKET_SHRINKS = "next graph is smaller"
    IDLE = "idle step"
    RANK_WITHOUT_KEYS = "context-parallel rank without a key"


class Coverage:
    """Counters of situations."""

    def __init__(self) -> None:
        self._counts: Counter[Situation] = Counter()

    def note(self, situation: Situation) -> None:
        """Count one situation."""
        self._counts[situation] += 1

    def add(self, other: Coverage) -> None:
        """Add the counts of another schedule."""
        self._counts.update(other._counts)

    def __getitem__(self, situation: Situation) -> int:
        return self._counts[situation]

    @property
    def missing(self) -> list[Situation]:
        """The situations that were never reached."""
        return [situation for situation in Situation if not self._counts[situation]]

    def table(self) -> str:
        """Return one line per situation: its count and its name."""
        width = max(map(len, map(str, self._counts.values())), default=1)
        return "\n".join(f"{self._counts[s]:>{width}}  {s}" for s in Situation)
