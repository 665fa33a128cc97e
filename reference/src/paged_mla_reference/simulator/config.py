"""The configuration of a simulated engine: its sizes and its scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_mla_reference.rules.parallel import UNDIVIDED, ContextParallel
from paged_mla_shared.errors import InvalidArgument

LARGEST_BLOCK_SIZE = 1 << 16
_LARGEST = {
    "block_size": LARGEST_BLOCK_SIZE,
    "num_blocks": 1 << 20,
    "max_rows": 1 << 16,
    "token_budget": 1 << 20,
    "max_chunk": 1 << 20,
}


class RowOrder(StrEnum):
    """The order of the rows in a mixed step."""

    DECODE_FIRST = "decode_first"
    AS_ARRIVED = "as_arrived"
    INTERLEAVED = "interleaved"  # prefill and decode rows alternate


class DraftKind(StrEnum):
    """The shape of the drafts that a step verifies: a chain or a tree."""

    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Configuration of speculative decoding.

    Parameters
    ----------
    kind : DraftKind
        Chains are causal rows, and a step may have them together with other rows. Trees are
        verified in a separate step; a fixed window of ``depth + 1`` tokens then writes their
        accepted tokens again (S-16).
    depth : int
        Draft tokens along one branch, 1 to 64.
    branches : int
        Branches of a tree, 1 to 64; 1 for chains.
    acceptance : float
        Probability that a draft token is right if all draft tokens before it are right, 0 to 1.
    multi_step : bool
        If true, each branch first runs through the cache, one token per step (S-15).
    """

    kind: DraftKind
    depth: int
    branches: int = 1
    acceptance: float = 0.6
    multi_step: bool = False

    @property
    def window(self) -> int:
        """Number of tokens of a draft-extend row."""
        return self.depth + 1

    @property
    def max_nodes(self) -> int:
        """Largest number of tokens of one verified row."""
        return 1 + self.branches * self.depth


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Configuration of a simulated engine.

    Parameters
    ----------
    block_size : int
        Tokens of one block in one rank's cache, 1 to 2^16.
    num_blocks : int
        1 to 2^20.
    max_rows : int
        Largest number of requests that run at the same time, 1 to 2^16.
    token_budget : int
        Largest number of query tokens of a causal step, 1 to 2^20.
    max_chunk : int
        Largest number of prompt tokens of one request in one step, 1 to 2^20.
    order : RowOrder
    drafts : Drafts, optional
    buckets : tuple of int
        Numbers of rows of captured graphs, ascending, 1 to 2^16. A step without prefill rows is
        padded to the smallest bucket with enough rows. Steps with prefill rows, and steps with more
        rows than every bucket, run without padding.
    padded_query_len : {0, 1}
        Query tokens of a padded row.
    group : ContextParallel
        A block has ``block_size`` tokens on every rank. The interleave divides ``block_size``.
    seed : int
        Seed of the order of free blocks and of the drafts.
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
        """Check the sizes.

        Raises
        ------
        InvalidArgument
            A size is out of range, or two parameters contradict each other.
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
            raise InvalidArgument("branches", drafts.branches, "1 branch in a chain")
        if drafts.window > self.token_budget:
            raise InvalidArgument("depth", drafts.depth, f"< token_budget = {self.token_budget}")
        if drafts.kind is DraftKind.TREE and self.group.world > 1:
            raise InvalidArgument("group", self.group, "one rank if the drafts are trees")

    @property
    def span(self) -> int:
        """Number of tokens of one block on all ranks together."""
        return self.block_size * self.group.world

    @property
    def lookahead(self) -> int:
        """Number of tokens for which a row may need blocks in addition to its request's tokens."""
        return 0 if self.drafts is None else self.drafts.max_nodes

    @property
    def longest(self) -> int:
        """Largest number of tokens, prompt and output, of a request that all blocks can hold."""
        return self.num_blocks * self.span - self.lookahead

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket that holds `rows` rows, or `rows` if there is none."""
        return next((size for size in self.buckets if size >= rows), rows)

    @property
    def max_step_rows(self) -> int:
        """Largest number of rows of a step, padded rows included, before ranks divide it."""
        branches = self.drafts.branches if self.drafts else 1
        return self.bucket(self.max_rows * branches)

    @property
    def max_step_tokens(self) -> int:
        """Largest number of query tokens of a step, padded tokens included."""
        longest = 1 if self.drafts is None else max(self.drafts.max_nodes, self.span + 1)
        return max(self.token_budget, self.max_step_rows * longest)
