"""How an engine schedules: its sizes and its habits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_mla_reference.rules.parallel import UNDIVIDED, ContextParallel
from paged_mla_shared.errors import InvalidArgument

_LARGEST = {
    "block_size": 1 << 16,
    "num_blocks": 1 << 20,
    "max_rows": 1 << 16,
    "token_budget": 1 << 20,
    "max_chunk": 1 << 20,
}


class RowOrder(StrEnum):
    """How the rows of a mixed step are arranged."""

    DECODE_FIRST = "decode_first"
    AS_ARRIVED = "as_arrived"
    INTERLEAVED = "interleaved"  # decode and prefill in turn


class DraftKind(StrEnum):
    """What is verified in one step: a chain of drafts, or a tree of them."""

    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Speculative decoding.

    Parameters
    ----------
    kind : DraftKind
        Chains are causal rows and mix with all others; trees fill a step of their own, and a
        fixed window of ``depth + 1`` tokens rewrites what they accepted (S-16).
    depth : int
        Draft tokens along one branch, 1 to 64.
    branches : int
        Branches of a tree, 1 to 64; chains have one.
    acceptance : float
        Probability that the next draft token is right, given that those before it are.
    multi_step : bool
        Let branches run through the cache first, one token per step (S-15).
    """

    kind: DraftKind
    depth: int
    branches: int = 1
    acceptance: float = 0.6
    multi_step: bool = False

    @property
    def window(self) -> int:
        """Tokens of a draft-extend row."""
        return self.depth + 1

    @property
    def max_nodes(self) -> int:
        """Most tokens of one row to verify."""
        return 1 + self.branches * self.depth


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and habits of an engine.

    Parameters
    ----------
    block_size : int
        Tokens of one block in one rank's cache.
    num_blocks : int
    max_rows : int
        Requests that run at once.
    token_budget : int
        Query tokens of one causal step.
    max_chunk : int
        Longest piece of a prompt in one step.
    order : RowOrder
    drafts : Drafts, optional
    buckets : tuple of int
        Row counts of captured graphs, ascending. Steps without prefill are padded to the next
        one, all others and larger ones run as they are.
    padded_query_len : {0, 1}
        Query tokens of a padded row.
    group : ContextParallel
        A block spans ``block_size`` tokens on every rank. Its interleave divides ``block_size``.
    seed : int
        Of the order of free blocks and of the drafts.
    """

    block_size: int = 16
    num_blocks: int = 64
    max_rows: int = 8
    token_budget: int = 64
    max_chunk: int = 64
    order: RowOrder = RowOrder.DECODE_FIRST
    drafts: Drafts | None = None
    buckets: tuple[int, ...] = ()
    padded_query_len: int = 0
    group: ContextParallel = UNDIVIDED
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot run.

        Raises
        ------
        InvalidArgument
        """
        for name, largest in _LARGEST.items():
            if not 1 <= getattr(self, name) <= largest:
                raise InvalidArgument(name, getattr(self, name), f"1 to {largest}")
        if list(self.buckets) != sorted(set(self.buckets)) or any(
            not 1 <= size <= _LARGEST["max_rows"] for size in self.buckets
        ):
            allowed = f"ascending numbers, 1 to {_LARGEST['max_rows']}"
            raise InvalidArgument("buckets", self.buckets, allowed)
        if self.padded_query_len not in {0, 1}:
            raise InvalidArgument("padded_query_len", self.padded_query_len, "0 or 1")
        if self.block_size % self.group.interleave:
            allowed = f"a divisor of block_size = {self.block_size}"
            raise InvalidArgument("interleave", self.group.interleave, allowed)
        if self.drafts is not None:
            self._check_drafts(self.drafts)

    def _check_drafts(self, drafts: Drafts) -> None:
        for name in ("depth", "branches"):
            if not 1 <= getattr(drafts, name) <= 64:
                raise InvalidArgument(name, getattr(drafts, name), "1 to 64")
        if not 0 <= drafts.acceptance <= 1:
            raise InvalidArgument("acceptance", drafts.acceptance, "0 to 1")
        if drafts.kind is DraftKind.CHAIN and drafts.branches > 1:
            raise InvalidArgument("branches", drafts.branches, "1 in a chain")
        if drafts.window > self.token_budget:
            raise InvalidArgument("depth", drafts.depth, f"< token_budget = {self.token_budget}")
        if drafts.kind is DraftKind.TREE and self.group.world > 1:
            raise InvalidArgument("group", self.group, "one rank when drafts are trees")

    @property
    def span(self) -> int:
        """Tokens of one block on all ranks together."""
        return self.block_size * self.group.world

    @property
    def lookahead(self) -> int:
        """Most tokens a row may hold past its request's own."""
        return 0 if self.drafts is None else self.drafts.max_nodes

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output: what all blocks together hold."""
        return self.num_blocks * self.span - self.lookahead

    def bucket(self, rows: int) -> int:
        """Return the rows of the graph that holds `rows`, or `rows` when none does."""
        return next((size for size in self.buckets if size >= rows), rows)

    @property
    def max_step_rows(self) -> int:
        """Most rows of a step, padded ones included, before ranks divide it."""
        branches = self.drafts.branches if self.drafts else 1
        return self.bucket(self.max_rows * branches)

    @property
    def max_step_tokens(self) -> int:
        """Most query tokens of a step, padded ones included."""
        longest = 1 if self.drafts is None else max(self.drafts.max_nodes, self.span + 1)
        return max(self.token_budget, self.max_step_rows * longest)
