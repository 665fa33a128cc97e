"""The oracle of every schedule: outputs that are computed only from a request's tokens (S-19).

This module uses no blocks, slots, chunks or steps. The keys of a token are the keys of its own
prefix, in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer, attend_one, nothing_visible, turn_error
from paged_mla_reference.rules.encoding import as_cached
from paged_mla_reference.rules.parallel import UNDIVIDED, ContextParallel
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_reference.simulator.model import Histories, ModelStandIn, State
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.step import Row
from paged_mla_shared.problem import Problem

Array = NDArray[np.float64]


class Dense:
    """Dense, unpaged attention over the prefix of each token.

    Parameters
    ----------
    problem : Problem
        The class reads its dims, dtype, cache format, scales and rope.
    model : ModelStandIn
    histories : Histories
    """

    def __init__(self, problem: Problem, model: ModelStandIn, histories: Histories) -> None:
        self._problem = problem
        self._layout = problem.layout
        self._model = model
        self._histories = histories
        self._keys: dict[str, list[Array]] = {}

    def answer(
        self,
        rows: tuple[Row, ...],
        num_tokens: int,
        rounding: Rounding,
        group: ContextParallel = UNDIVIDED,
        rank: int = 0,
    ) -> Answer:
        """Return the output of every query token of the rows over the keys of one rank.

        Parameters
        ----------
        rows : tuple of Row
        num_tokens : int
            T; tokens past the rows' tokens have the output of padding (S-6).
        rounding : Rounding
        group : ContextParallel
        rank : int
            Keys at positions of other ranks are ignored (S-18).
        """
        dims = self._problem.dims
        answer = nothing_visible(num_tokens, dims.num_heads, dims.kv_lora_rank)
        token = 0
        for row in rows:
            states = self._histories.of_queries(row)
            own = [
                self._key(state, row.context_len + len(row.ancestors(node)) - 1)
                for node, state in enumerate(states)
            ]
            known = np.array(self._context(row) + own)  # [context + nodes, R+P]
            context = np.arange(len(known) - len(own))
            for node, state in enumerate(states):
                seen = [len(context) + before for before in row.ancestors(node)]
                keys = known[np.concatenate([context, seen]).astype(np.int64)]
                mine = keys[group.owner(np.arange(len(keys))) == rank]  # [K, R+P]
                if len(mine):
                    query = self._query(state, len(keys) - 1, rounding)
                    one = attend_one(self._problem, query, mine, rounding)
                    answer.out[token], answer.lse[token] = one[:2]
                    answer.score_bound[token], answer.value_bound[token] = one[2:]
                    answer.turn_error[token] = turn_error(self._problem, query, mine)
                token += 1
        return answer

    def forget(self, request_id: str) -> None:
        """Remove the keys of a request that is not needed again."""
        self._keys.pop(request_id, None)

    def _context(self, row: Row) -> list[Array]:
        """Return the keys of a row's context as the cache stores them, [R+P] each."""
        keys = self._own_keys(row.request, row.committed)
        drafted = self._histories.of_branch(row)
        return keys + [self._key(s, row.committed + i) for i, s in enumerate(drafted)]

    def _own_keys(self, request: Request, length: int) -> list[Array]:
        keys = self._keys.setdefault(request.id, [])
        while len(keys) < length:
            keys.append(self._key(self._histories.state(request, len(keys) + 1), len(keys)))
        return keys[:length]

    def _key(self, state: State, position: int) -> Array:
        """Return a token's rotated key as attention reads it from the cache, [R+P]."""
        ckv, k_pe = self._model.latent(state)
        if self._problem.rope is not None:
            k_pe = round_to(self._turned(k_pe, position), self._problem.dtype)
        return np.hstack([widen(x)[0] for x in as_cached(self._layout, ckv[None], k_pe[None])])

    def _query(self, state: State, position: int, rounding: Rounding) -> Array:
        """Return a token's rotated query; with ``SPEC``, its rotation is rounded, [H, R+P]."""
        q_nope, q_pe = self._model.query(state)
        if self._problem.rope is not None:
            q_pe = self._turned(q_pe, position)
            if rounding is Rounding.SPEC:
                q_pe = round_to(q_pe, self._problem.dtype)
        return np.concatenate([widen(q_nope), widen(q_pe)], axis=1)  # [H, R+P]

    def _turned(self, x: NDArray[Any], position: int) -> Array:
        assert self._problem.rope is not None
        turned: Array = rotate(widen(x)[None], np.array([position]), self._problem.rope)[0]
        return turned
