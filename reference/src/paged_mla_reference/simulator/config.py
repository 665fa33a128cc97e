"""How an engine schedules: its sizes and its habits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_mla_reference.parallel import UNDIVIDED, ContextParallel
from paged_mla_shared.errors import InvalidArgument


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
        Draft tokens along one branch, >= 1.
    branches : int
        Branches of a tree, >= 1; chains have one.
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
        Tokens of one block in one rank's cache, >= 1.
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
        for name in ("block_size", "num_blocks", "max_rows", "token_budget", "max_chunk"):
            if getattr(self, name) < 1:
                raise InvalidArgument(name, getattr(self, name), ">= 1")
        if list(self.buckets) != sorted(set(self.buckets)) or any(b < 1 for b in self.buckets):
            raise InvalidArgument("buckets", self.buckets, "ascending numbers >= 1")
        if self.padded_query_len not in {0, 1}:
            raise InvalidArgument("padded_query_len", self.padded_query_len, "0 or 1")
        if self.block_size % self.group.interleave:
            allowed = f"a divisor of block_size = {self.block_size}"
            raise InvalidArgument("interleave", self.group.interleave, allowed)
        if self.drafts is not None:
            self._check_drafts(self.drafts)

    def _check_drafts(self, drafts: Drafts) -> None:
        if drafts.depth < 1 or drafts.branches < 1:
            raise InvalidArgument("drafts", drafts, "depth and branches >= 1")
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

    def bucket(self, rows: int) -> int:
        """Return the rows of the graph that holds `rows`, or `rows` when none does."""
        return next((size for size in self.buckets if size >= rows), rows)

    @property
    def max_step_rows(self) -> int:
        """Most rows of a step, padded ones included, before ranks divide it."""
        branches = self.drafts.branches if self.drafts else 1
        return max(self.bucket(rows) for rows in range(1, self.max_rows * branches + 1))

    @property
    def max_step_tokens(self) -> int:
        """Most query tokens of a step, padded ones included."""
        longest = 1 if self.drafts is None else max(self.drafts.max_nodes, self.span + 1)
        return max(self.token_budget, self.max_step_rows * longest)
