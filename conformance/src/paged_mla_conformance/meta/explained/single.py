"""Make steps with one random fault that is not in the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paged_mla_conformance.meta.explained.dumps import failing_step
from paged_mla_conformance.meta.explained.healthy import DTYPES
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.backend import ReferenceBackend
from paged_mla_reference.faults.kernel.change import (
    answering,
    appending,
    scoring,
    seeing,
    with_batch,
    writing,
)
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.attention import QueryAnswer, attend_one
from paged_mla_reference.rules.rounding import Rounding, widen
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases import GROUPS, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dump import Dump
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

READ = ("S-1", "S-4", "S-5", "S-7", "S-9")
Random = np.random.Generator
Seen = Any


@dataclass(frozen=True)
class Single:
    """A dump with one fault, the description of the fault, and the rules that it breaks."""

    what: str
    rules: tuple[str, ...]
    dump: Dump


def single_faults(count: int, seed: int = 0) -> Iterator[Single]:
    """Yield `count` steps with one fault each; the kinds of faults rotate."""
    rng = np.random.default_rng(seed)
    cases = [case for group in ("extend", "mixed", "decode") for case in GROUPS[group]]
    small = [c for c in cases if sum(r.seq_len for step in c.steps for r in step) < 3000]
    made = 0
    while made < count:
        kind, rules = list(_KINDS.items())[made % len(_KINDS)]
        case = small[rng.integers(len(small))]
        dtype = DTYPES[made % len(DTYPES)]
        stage = Stage.of(build_steps(case, SMALL, dtype)[0])
        live = np.flatnonzero(stage.batch.seq_lens > 3)
        fault = kind(rng, stage, int(rng.choice(live))) if live.size else None
        if fault is None:
            continue
        what, change = fault
        wrong = ReferenceBackend(oracle=change(RIGHT))
        dump = failing_step(partial(replace, wrong), partial(_ask, case, dtype))
        if dump is not None:  # None if the fault changes no output by more than rounding
            made += 1
            yield Single(f"{case.id}, {dtype}: {what}", rules, dump)


def _ask(case: Case, dtype: str, backend: Backend) -> None:
    Trial(backend, case, SMALL, dtype).check_step()


SingleFault = tuple[str, Callable[[Oracle], Oracle]] | None


def _key(rng: Random, stage: Stage, row: int) -> SingleFault:
    """Hide one key of a row."""
    key = int(rng.integers(stage.batch.seq_lens[row] - stage.batch.query_lens[row] + 1))

    def change(_p: Problem, _b: Batch, r: int, seen: Seen) -> Seen:
        out = seen.copy()
        if r == row:
            out[:, key] = False
        return out

    return f"row {row} does not see key {key}", lambda o: seeing(o, change)


def _length(rng: Random, stage: Stage, row: int) -> SingleFault:
    """Hide some of the last keys of a row."""
    cut = int(rng.integers(2, max(3, int(stage.batch.seq_lens[row]) // 2)))

    def change(_p: Problem, _b: Batch, r: int, seen: Seen) -> Seen:
        out = seen.copy()
        if r == row:
            out[:, -cut:] = False
        return out

    return f"row {row} lacks its last {cut} keys", lambda o: seeing(o, change)


def _block(rng: Random, stage: Stage, row: int) -> SingleFault:
    """Put another block into one entry of a row's table."""
    problem = stage.problem
    used_columns = -(-int(stage.batch.seq_lens[row]) // problem.block_size)
    column = int(rng.integers(used_columns))
    own = int(stage.batch.block_table[row, column])
    others = np.setdiff1d(stage.before.block_ids, [own])
    if not others.size:
        return None
    block = int(rng.choice(others))

    def change(_: Problem, batch: Batch) -> Batch:
        table = batch.block_table.copy()
        table[row, column] = block
        return replace(batch, block_table=table)

    return f"row {row} reads block {block} in column {column}", lambda o: with_batch(o, change)


def _head(rng: Random, stage: Stage, _row: int) -> SingleFault:
    """Use another softmax scale in one head."""
    head = int(rng.integers(stage.problem.dims.num_heads))
    factor = float(rng.uniform(1.2, 3))

    def attend(problem: Problem, query: Any, keys: Any, rounding: Rounding) -> QueryAnswer:
        query = query.copy()
        query[head] *= factor
        return attend_one(problem, query, keys, rounding)

    return f"head {head} takes {factor:.3g} times the scale", lambda o: scoring(o, attend)


def _answer(rng: Random, stage: Stage, row: int) -> SingleFault:
    """Double one number of an output."""
    token = int(stage.batch.cu_seqlens_q[row])
    head = int(rng.integers(stage.problem.dims.num_heads))

    def change(_p: Problem, _b: Batch, answer: Output) -> Output:
        at = int(np.argmax(np.abs(widen(answer.out[token, head]))))
        answer.out[token, head, at] *= 2
        return answer

    return f"an element of token {token}, head {head} is doubled", lambda o: answering(o, change)


def _sum(rng: Random, stage: Stage, _row: int) -> SingleFault:
    """Add a small number to the lse of one head."""
    head = int(rng.integers(stage.problem.dims.num_heads))
    plus = np.float32(rng.uniform(0.05, 0.5))

    def change(_p: Problem, _b: Batch, answer: Output) -> Output:
        answer.lse[:, head] += plus
        return answer

    return f"lse of head {head} is {plus:.3g} too much", lambda o: answering(o, change)


def _slot(rng: Random, stage: Stage, row: int) -> SingleFault:
    """Write one token of the step to a free slot."""
    if stage.batch.slot_mapping is not None:
        return None
    free = np.setdiff1d(np.arange(stage.problem.num_blocks), stage.batch.block_table)
    if not free.size:
        return None
    token = int(stage.batch.cu_seqlens_q[row])
    slot = int(rng.choice(free)) * stage.problem.block_size

    def change(_p: Problem, _b: Batch, slots: Any) -> Any:
        slots[token] = slot
        return slots

    return f"token {token} is written to slot {slot}", lambda o: writing(o, change)


def _latent(rng: Random, stage: Stage, row: int) -> SingleFault:
    """Invert the sign of one element of a written latent."""
    token = int(stage.batch.cu_seqlens_q[row])
    at = int(rng.integers(stage.problem.dims.kv_lora_rank))

    def change(_: Problem, batch: Batch) -> Batch:
        ckv = batch.ckv.copy()
        ckv[token, at] = -ckv[token, at]
        return replace(batch, ckv=ckv)

    return f"element {at} of token {token} is stored negative", lambda o: appending(o, change)


def _position(rng: Random, stage: Stage, row: int) -> SingleFault:
    """Add a number to the positions of one row."""
    by = int(rng.integers(1, 9))
    span = slice(*stage.batch.cu_seqlens_q[row : row + 2].tolist())

    def change(oracle: Oracle) -> Oracle:
        def moved(problem: Problem, batch: Batch) -> Metadata:
            found = oracle.metadata(problem, batch)
            positions = found.positions.copy()
            positions[span] += by
            return replace(found, positions=positions)

        return replace(oracle, metadata=moved)

    return f"positions of row {row} are {by} too large", change


def _query(_rng: Random, stage: Stage, row: int) -> SingleFault:
    """Attend in one row with `q_nope` of the previous tokens."""
    tokens = np.arange(*stage.batch.cu_seqlens_q[row : row + 2].tolist())
    if not tokens.size or stage.batch.num_tokens < 2:
        return None
    source = (tokens - 1) % stage.batch.num_tokens

    def change(_: Problem, batch: Batch) -> Batch:
        q_nope = batch.q_nope.copy()
        q_nope[tokens] = batch.q_nope[source]
        return replace(batch, q_nope=q_nope)

    return f"row {row} attends with other queries", lambda o: with_batch(o, change)


_KINDS: dict[Callable[[Random, Stage, int], SingleFault], tuple[str, ...]] = {
    _key: READ,
    _length: READ,
    _block: READ,
    _head: READ,
    _answer: ("S-5",),
    _sum: ("S-7",),
    _slot: ("S-10",),
    _latent: ("S-10",),
    _position: ("S-3",),
    _query: READ,
}
