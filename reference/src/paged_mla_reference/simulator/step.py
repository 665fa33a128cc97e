"""One engine step, as rows of requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_mla_reference.simulator.request import Request
from paged_mla_shared.problem import Mask


class Kind(StrEnum):
    """What a row is doing."""

    PREFILL = "prefill"  # a chunk of known tokens
    DECODE = "decode"  # one token, the last that was sampled
    VERIFY = "verify"  # that token and a chain of drafts
    TREE = "tree"  # that token and a tree of drafts
    DRAFT = "draft"  # one branch of a draft (S-15)
    WINDOW = "window"  # accepted tokens again, at their own slots, in a fixed window (S-16)


@dataclass(frozen=True)
class Row:
    """Query tokens of one request in one step.

    Parameters
    ----------
    request : Request
    kind : Kind
    committed : int
        Leading tokens of the request that the row finds in the cache.
    tokens : tuple of int
        Query tokens.
    blocks : tuple of int
        The row's block ids; may reach past what it reads.
    branch : tuple of int
        Drafted tokens that follow the committed ones in the cache.
    parents : tuple of int, optional
        Of each query token: the query token before it on its path, -1 if that is the context.
        ``None`` for a chain.
    """

    request: Request
    kind: Kind
    committed: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    branch: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None

    @property
    def query_len(self) -> int:
        """Query tokens."""
        return len(self.tokens)

    @property
    def context_len(self) -> int:
        """Tokens in the cache before the step (S-2)."""
        return self.committed + len(self.branch)

    def parent(self, token: int) -> int:
        """Return the query token before `token` on its path, -1 if that is the context."""
        return token - 1 if self.parents is None else self.parents[token]

    def ancestors(self, token: int) -> list[int]:
        """Return the query tokens on the path to `token`, itself last."""
        path = []
        while token >= 0:
            path.append(token)
            token = self.parent(token)
        return path[::-1]


@dataclass(frozen=True)
class Step:
    """Rows that run together, real ones first.

    Parameters
    ----------
    number : int
        Counts from 0.
    mask : Mask
        ``CAUSAL`` or ``TREE``.
    rows : tuple of Row
        Empty in an idle step.
    num_rows, num_tokens : int
        B and T, padding included.
    padded_query_len : int
        Query tokens of each padded row.
    """

    number: int
    mask: Mask
    rows: tuple[Row, ...]
    num_rows: int
    num_tokens: int
    padded_query_len: int

    @property
    def query_tokens(self) -> int:
        """Query tokens of real rows."""
        return sum(row.query_len for row in self.rows)
