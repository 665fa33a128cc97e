"""One engine step as rows of requests."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_mla_reference.simulator.request import Request
from paged_mla_shared.problem import Mask


class Kind(StrEnum):
    """The purpose of a row."""

    PREFILL = "prefill"  # computes a chunk of known tokens
    DECODE = "decode"  # computes the newest sampled token
    VERIFY = "verify"  # computes the newest sampled token and a chain of drafts
    TREE = "tree"  # computes the newest sampled token and a tree of drafts
    DRAFT = "draft"  # computes the next token of one draft branch (S-15)
    WINDOW = "window"  # computes accepted tokens again, at their own slots (S-16)


@dataclass(frozen=True)
class Row:
    """Query tokens of one request in one step.

    Parameters
    ----------
    request : Request
    kind : Kind
    committed : int
        Number of the request's leading tokens that are in the cache.
    tokens : tuple of int
        Ids of the query tokens.
    blocks : tuple of int
        The row's block ids; there may be more blocks than the row reads.
    branch : tuple of int
        Drafted tokens that follow the committed tokens in the cache.
    parents : tuple of int, optional
        For each query token, the query token before it on its path, or -1 if the context is before
        it. ``None`` for a chain.
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
        """Number of query tokens."""
        return len(self.tokens)

    @property
    def context_len(self) -> int:
        """Number of tokens in the cache before the step (S-2)."""
        return self.committed + len(self.branch)

    def parent(self, token: int) -> int:
        """Return the query token before `token` on its path, or -1 if the context is before it."""
        return token - 1 if self.parents is None else self.parents[token]

    def ancestors(self, token: int) -> list[int]:
        """Return the query tokens on the path to `token`; `token` is the last of them."""
        path = []
        while token >= 0:
            path.append(token)
            token = self.parent(token)
        return path[::-1]


@dataclass(frozen=True)
class Step:
    """Rows that run together; padded rows follow the real rows.

    Parameters
    ----------
    number : int
        Number of the step, from 0.
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
        """Number of query tokens of the real rows."""
        return sum(row.query_len for row in self.rows)
