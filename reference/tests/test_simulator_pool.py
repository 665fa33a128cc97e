"""Blocks: taken, shared, released, cached, evicted."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_mla_reference.rules.prefix import block_contents
from paged_mla_reference.simulator.block_pool import BlockPool
from paged_mla_reference.simulator.coverage import Coverage, Situation

SPAN = 2


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, SPAN, Coverage())


def publish(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Take blocks for `tokens`, make them known, and return them."""
    contents = block_contents(tokens, SPAN)
    blocks = pool.take(len(contents))
    for block, content in zip(blocks, contents, strict=True):
        pool.publish(block, content)
    return blocks


def test_known_blocks_stay_after_release():
    """S-13: computed blocks can be hit when no row uses them any more."""
    pool = pool_of(4)
    blocks = publish(pool, [1, 2, 3, 4])
    pool.release(blocks)
    assert pool.lookup(block_contents([1, 2, 3, 4], SPAN)) == blocks
    assert (len(pool.free), len(pool.cached)) == (2, 2)


def test_free_blocks_go_first():
    """S-13: cached blocks are evicted only when nothing else is left."""
    pool = pool_of(3)
    blocks = publish(pool, [1, 2])
    pool.release(blocks)
    assert blocks[0] not in pool.take(2)
    assert pool.take(1) == blocks
    assert pool.lookup(block_contents([1, 2], SPAN)) == []


def test_the_least_recently_used_goes_first():
    """S-13: a hit makes a block young again."""
    pool = pool_of(2)
    old, young = publish(pool, [1, 2]), publish(pool, [3, 4])
    pool.release(old)
    pool.release(young)
    pool.share(old)
    pool.release(old)
    assert pool.take(1) == young


def test_the_end_of_a_request_goes_before_its_beginning():
    """S-13: a prefix is worth more than what follows it."""
    pool = pool_of(3)
    blocks = publish(pool, [1, 2, 3, 4, 5, 6])
    pool.release(blocks)
    assert pool.take(2) == [blocks[2], blocks[1]]


def test_a_shared_block_is_not_taken_again():
    """S-13: it becomes available when its last user is gone."""
    pool = pool_of(1)
    blocks = publish(pool, [1, 2])
    pool.share(blocks)
    pool.release(blocks)
    assert not pool.can_take((), 1)
    pool.release(blocks)
    assert pool.can_take((), 1)


def test_a_hit_uses_up_what_it_wakes():
    """S-13: cached blocks of a hit cannot be evicted for the same request."""
    pool = pool_of(2)
    blocks = publish(pool, [1, 2])
    pool.release(blocks)
    assert pool.can_take(blocks, 1)
    assert not pool.can_take(blocks, 2)


def test_a_second_copy_is_not_known():
    """S-13: of two blocks with the same tokens the older one is hit, the other just freed."""
    pool = pool_of(2)
    first, second = publish(pool, [1, 2]), publish(pool, [1, 2])
    assert pool.lookup(block_contents([1, 2], SPAN)) == first
    pool.release(second)
    assert pool.free == second


def test_eviction_of_a_formerly_shared_block_is_counted():
    """S-13: the coverage table counts it separately from other evictions."""
    coverage = Coverage()
    pool = BlockPool(2, SPAN, coverage)
    shared = publish(pool, [1, 2])
    pool.share(shared)
    alone = publish(pool, [3, 4])
    for blocks in (shared, shared, alone):
        pool.release(blocks)
    pool.take(2)
    assert coverage[Situation.EVICTION] == 2
    assert coverage[Situation.EVICTION_OF_SHARED] == 1


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(6)
        self.held: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def admit(self, tokens: list[int]) -> None:
        contents = block_contents(tokens, SPAN)
        hit = self.pool.lookup(contents)
        more = -(-len(tokens) // SPAN) - len(hit)
        if not self.pool.can_take(hit, more):
            return
        self.pool.share(hit)
        blocks = hit + self.pool.take(more)
        assert len(set(blocks)) == len(blocks)
        for block, content in zip(blocks, contents, strict=False):
            self.pool.publish(block, content)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        users = [self.pool.references(block) for block in range(6)]
        assert users == [sum(block in blocks for blocks in self.held) for block in range(6)]
        idle = sorted(self.pool.free + self.pool.cached)
        assert idle == [block for block in range(6) if not users[block]]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.__doc__ = (
    "S-13: references are counted, and no block is lost, in any order of calls."
)
TestPoolMachine.settings = settings(derandomize=True, deadline=None, max_examples=40)


def test_growing_takes_what_is_missing():
    """S-1: a row of 5 tokens needs 3 blocks of 2."""
    pool = pool_of(4)
    blocks = pool.take(1)
    pool.grow(blocks, 5)
    assert len(blocks) == 3
    assert pool.can_grow(blocks, 8)
    assert not pool.can_grow(blocks, 9)
    pool.grow(blocks, 1)
    assert len(blocks) == 3


@pytest.mark.parametrize("seed", [0, 1])
def test_block_ids_are_in_no_order(seed: int):
    """S-1: nothing may depend on ids that ascend."""
    taken = BlockPool(16, SPAN, Coverage(), seed).take(16)
    assert sorted(taken) == list(range(16))
    assert taken not in (list(range(16)), list(range(16))[::-1])
