"""The simulator's own tests can fail: seven seeded faults, each caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulator_runs import ask, check_answers, run, words

from paged_mla_reference import prefix
from paged_mla_reference.prefix import ROOT_KEY, PrefixIndex
from paged_mla_reference.simulator import batches
from paged_mla_reference.simulator.audit import Violation
from paged_mla_reference.simulator.block_pool import BlockPool
from paged_mla_reference.simulator.config import EngineConfig, RowOrder
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.step import Row

Patch = pytest.MonkeyPatch
SYSTEM, MIDDLE = words("system", 4), words("middle", 4)
SCENARIO = Scenario(
    name="faults",
    why="equal blocks behind different ones, blocks shared and evicted, chunks beside decode",
    config=EngineConfig(
        block_size=4,
        num_blocks=12,
        max_rows=3,
        token_budget=12,
        max_chunk=5,
        order=RowOrder.DECODE_FIRST,
    ),
    requests=(
        ask("one", SYSTEM + MIDDLE + words("tail 1", 2), 3),
        ask("last-token-differs", (*SYSTEM[:3], 7, *MIDDLE, 8), 3, arrival=5),
        ask("swapped-blocks", (*MIDDLE, *SYSTEM, 8), 3, arrival=10),
        ask("again", SYSTEM + MIDDLE + words("tail 2", 3), 9, arrival=14),
        ask("crowd", 19, 6, arrival=16),
        ask("more", 9, 4, arrival=17),
    ),
)


def trusting_index(patch: Patch) -> None:
    """Let the prefix index believe its keys, so that a wrong key reaches the schedule."""

    def find(index, content):
        entry = index._entries.get(content.key)
        return None if entry is None else entry[1]

    patch.setattr(PrefixIndex, "find", find)


def hash_ignores_the_last_token(patch: Patch) -> None:
    right = prefix.block_key
    patch.setattr(prefix, "block_key", lambda p, tokens, extra=(): right(p, tokens[:-1], extra))


def hash_ignores_the_parent(patch: Patch) -> None:
    right = prefix.block_key
    patch.setattr(prefix, "block_key", lambda _, tokens, extra=(): right(ROOT_KEY, tokens, extra))


def references_are_not_dropped(patch: Patch) -> None:
    def release(pool, block_ids):
        assert pool.available + len(block_ids) > 0

    patch.setattr(BlockPool, "release", release)


def a_live_block_is_evicted(patch: Patch) -> None:
    def evict(pool):
        block_id = next(iter(pool._contents))
        pool._cached.pop(block_id, None)
        pool._index.evict(pool._contents.pop(block_id))
        return block_id

    patch.setattr(BlockPool, "_evict", evict)


def cleanup_never_runs(patch: Patch) -> None:
    patch.setattr(Engine, "_retire", lambda engine, seq: engine.running.remove(seq))


def positions_count_from_the_chunk(patch: Patch) -> None:
    patch.setattr(Row, "context_len", 0)


def row_order_is_mixed(patch: Patch) -> None:
    right = batches.lay_out

    def lay_out(rows):
        layout = right(rows)
        return replace(layout, block_table=layout.block_table[::-1])

    patch.setattr(batches, "lay_out", lay_out)


FAULTS = [
    hash_ignores_the_last_token,
    hash_ignores_the_parent,
    references_are_not_dropped,
    a_live_block_is_evicted,
    cleanup_never_runs,
    positions_count_from_the_chunk,
    row_order_is_mixed,
]
WRONG_ANSWERS = [
    hash_ignores_the_last_token,
    hash_ignores_the_parent,
    a_live_block_is_evicted,
    positions_count_from_the_chunk,
    row_order_is_mixed,
]


@pytest.mark.parametrize("num_blocks", [12, 40])
def test_without_a_fault_all_is_well(num_blocks: int):
    """S-13, S-19: the schedule that catches the faults is right without them."""
    config = replace(SCENARIO.config, num_blocks=num_blocks)
    run(config, SCENARIO.requests)
    assert check_answers(replace(SCENARIO, config=config)) > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_the_audit_catches(fault: Callable[[Patch], None], monkeypatch: Patch):
    """S-1, S-3, S-13: a wrong slot, length or leak is found without any attention."""
    trusting_index(monkeypatch)
    fault(monkeypatch)
    config = replace(SCENARIO.config, num_blocks=12 if fault in WRONG_ANSWERS else 40)
    with pytest.raises(Violation):
        run(config, SCENARIO.requests)


@pytest.mark.parametrize("fault", WRONG_ANSWERS)
def test_answers_catch(fault: Callable[[Patch], None], monkeypatch: Patch):
    """S-19: a fault that changes what is read changes an answer."""
    trusting_index(monkeypatch)
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        check_answers(SCENARIO)


@pytest.mark.parametrize("fault", FAULTS[:2])
def test_the_index_catches_a_wrong_hash(fault: Callable[[Patch], None], monkeypatch: Patch):
    """S-13: the index compares contents, so that a colliding key never becomes a hit."""
    fault(monkeypatch)
    with pytest.raises(RuntimeError, match="one key for two contents"):
        run(SCENARIO.config, SCENARIO.requests)
