"""A replacement for a model: synthetic queries and latents of each token.

The numbers of a token come from a random generator. Its key is the hash of every input of a real
model up to this token: the request's extra keys, every token before it, and the token itself. Equal
prefixes give equal numbers in any request, row or step. Different prefixes give unrelated numbers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.rounding import round_to
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.step import Row
from paged_mla_shared.dims import MlaDims

State = bytes  # 16 bytes, the hash of a token prefix


def root(extra_keys: tuple[str, ...]) -> State:
    """Return the state before the first token."""
    digest = hashlib.blake2b(b"layer 0", digest_size=16)
    for key in extra_keys:
        digest.update(len(key).to_bytes(8, "little") + key.encode())
    return digest.digest()


def follow(state: State, token: int) -> State:
    """Return the state after one more token."""
    return hashlib.blake2b(state + token.to_bytes(8, "little"), digest_size=16).digest()


class Histories:
    """The states of the tokens of requests; each state of a request's own token is kept."""

    def __init__(self) -> None:
        self._states: dict[str, list[State]] = {}

    def state(self, request: Request, length: int) -> State:
        """Return the state after the first `length` tokens of a request."""
        if request.id not in self._states:
            self._states[request.id] = [root(request.extra_keys)]
        states = self._states[request.id]
        while len(states) <= length:
            states.append(follow(states[-1], request.tokens[len(states) - 1]))
        return states[length]

    def of_branch(self, row: Row) -> list[State]:
        """Return the states after each drafted token of a row's context."""
        states = [self.state(row.request, row.committed)]
        for token in row.branch:
            states.append(follow(states[-1], token))
        return states[1:]

    def of_queries(self, row: Row) -> list[State]:
        """Return the state after each query token of a row; a tree node follows its parent."""
        context = [self.state(row.request, row.committed), *self.of_branch(row)][-1]
        states: list[State] = []
        for node, token in enumerate(row.tokens):
            parent = row.parent(node)
            states.append(follow(context if parent < 0 else states[parent], token))
        return states

    def forget(self, request_id: str) -> None:
        """Remove the states of a request that is not needed again."""
        self._states.pop(request_id, None)


@dataclass(frozen=True)
class ModelStandIn:
    """Queries and latents of tokens, computed from their states.

    Parameters
    ----------
    dims : MlaDims
    dtype : str
        The type to which the standard normal values are rounded.
    """

    dims: MlaDims
    dtype: str

    def latent(self, state: State) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ``ckv`` [R] and ``k_pe`` [P] of the token that led to `state`."""
        values = self._draw(state, 0, self.dims.cached_dim)
        return values[: self.dims.kv_lora_rank], values[self.dims.kv_lora_rank :]

    def query(self, state: State) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ``q_nope`` [H, R] and ``q_pe`` [H, P] of the token that led to `state`."""
        heads, rank = self.dims.num_heads, self.dims.kv_lora_rank
        values = self._draw(state, 1, heads * self.dims.cached_dim).reshape(heads, -1)
        return values[:, :rank], values[:, rank:]

    def _draw(self, state: State, stream: int, count: int) -> NDArray[Any]:
        key = np.frombuffer(state, np.uint64)
        counter = np.array([0, 0, 0, stream], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
        return round_to(generator.standard_normal(count, dtype=np.float32), self.dtype)
