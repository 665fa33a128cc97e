"""The simulator's own tests can fail: seven seeded faults, each caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator_runs import ask, check_answers, run, words

from paged_mla_reference.faults import CATALOGUE
from paged_mla_reference.faults.patches import patched
from paged_mla_reference.rules.prefix import PrefixIndex
from paged_mla_reference.simulator.audit import Violation
from paged_mla_reference.simulator.config import EngineConfig, RowOrder
from paged_mla_reference.simulator.scenario import Scenario

SYSTEM, MIDDLE = words("system", 4), words("middle", 4)
SCENARIO = Scenario(
    name="faults",
    why="equal blocks behind different ones, blocks shared and evicted, chunks with decode",
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


LEAKS = ("references-are-not-dropped", "cleanup-never-runs")
WRONG_ANSWERS = (
    "positions-count-from-the-chunk",
    "hash-ignores-the-last-token",
    "hash-ignores-the-parent",
    "a-live-block-is-evicted",
    "tables-of-rows-are-reversed",
)


@pytest.mark.parametrize("num_blocks", [12, 40])
def test_without_a_fault_all_is_well(num_blocks: int):
    """S-13, S-19: the schedule that catches the faults is right without them."""
    config = replace(SCENARIO.config, num_blocks=num_blocks)
    run(config, SCENARIO.requests)
    assert check_answers(replace(SCENARIO, config=config)) > 10


@pytest.mark.parametrize("name", [*LEAKS, *WRONG_ANSWERS])
def test_the_audit_catches(name: str):
    """S-1, S-3, S-13: a wrong slot, length or leak is found without any attention."""
    config = replace(SCENARIO.config, num_blocks=12 if name in WRONG_ANSWERS else 40)
    with CATALOGUE[name].change(), pytest.raises(Violation):
        run(config, SCENARIO.requests)


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_outputs_show(name: str):
    """S-19: a fault that changes the read tokens changes an output."""
    with CATALOGUE[name].change(), pytest.raises((AssertionError, ValueError)):
        check_answers(SCENARIO)


@pytest.mark.parametrize("name", ["hash-ignores-the-last-token", "hash-ignores-the-parent"])
def test_the_index_catches_a_wrong_hash(name: str):
    """S-13: the index compares contents, so that a colliding key never becomes a hit."""
    comparing = PrefixIndex, "find", PrefixIndex.find
    caught = pytest.raises(RuntimeError, match="another content with the same key")
    with CATALOGUE[name].change(), patched(comparing), caught:
        run(SCENARIO.config, SCENARIO.requests)
