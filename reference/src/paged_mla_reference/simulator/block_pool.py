"""Blocks of a paged cache: their references, their contents and their eviction."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

from paged_mla_reference.rules.paging import blocks_of
from paged_mla_reference.rules.prefix import BlockContent, PrefixIndex
from paged_mla_reference.simulator.coverage import Coverage, Situation


class BlockPool:
    """Reference-counted blocks with a prefix index (S-13).

    A block is *used* (a row refers to it), *cached* (no row refers to it, but its content is known
    and a later request may reuse it) or *free*. Only full blocks with committed tokens have known
    contents. No row writes to these blocks, so rows can share them without a copy.

    Parameters
    ----------
    num_blocks : int
    span : int
        Tokens per block.
    coverage : Coverage
        Counts evictions.
    seed : int
        Seed of the order of free blocks.
    """

    def __init__(self, num_blocks: int, span: int, coverage: Coverage, seed: int = 0) -> None:
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._refs = [0] * num_blocks
        self._span = span
        self._index = PrefixIndex(span)
        self._contents: dict[int, BlockContent] = {}  # of blocks with known contents
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._was_shared: set[int] = set()
        self._changed: set[int] = set()
        self._coverage = coverage

    @property
    def available(self) -> int:
        """Number of blocks that can be taken: free blocks, and cached blocks, which are evicted."""
        return len(self._free) + len(self._cached)

    @property
    def free(self) -> list[int]:
        """Blocks without known contents that no row uses."""
        return list(self._free)

    @property
    def cached(self) -> list[int]:
        """Unreferenced blocks with known contents, least recently used first."""
        return list(self._cached)

    def take_changed(self) -> set[int]:
        """Return the blocks whose references changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def is_cached(self, block_id: int) -> bool:
        """Return whether a block is unreferenced and has known contents."""
        return block_id in self._cached

    def references(self, block_id: int) -> int:
        """Return how many rows refer to a block."""
        return self._refs[block_id]

    def lookup(self, contents: Sequence[BlockContent]) -> list[int]:
        """Return the blocks of the longest run of known `contents`, from the first content on."""
        return self._index.longest(contents)

    def can_take(self, hit: Sequence[int], more: int) -> bool:
        """Return whether `more` blocks can be taken after the blocks of a hit are shared."""
        woken = sum(self._refs[block_id] == 0 for block_id in hit)
        return woken + more <= self.available

    def share(self, hit: Sequence[int]) -> None:
        """Add one reference to every block of a hit."""
        self._changed.update(hit)
        for block_id in hit:
            if self._refs[block_id] == 0:
                del self._cached[block_id]
            else:
                self._was_shared.add(block_id)
            self._refs[block_id] += 1

    def take(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; evict cached blocks if necessary."""
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._changed.update(taken)
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def can_grow(self, block_ids: Sequence[int], tokens: int) -> bool:
        """Return whether `block_ids` can be extended to hold `tokens` tokens."""
        return blocks_of(tokens, self._span) - len(block_ids) <= self.available

    def grow(self, block_ids: list[int], tokens: int) -> None:
        """Extend `block_ids` in place until they hold `tokens` tokens."""
        block_ids += self.take(max(blocks_of(tokens, self._span) - len(block_ids), 0))

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one reference to every block; evictions take the last block of the list first."""
        self._changed.update(block_ids)
        for block_id in reversed(block_ids):
            self._refs[block_id] -= 1
            if self._refs[block_id] == 0:
                if block_id in self._contents:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def publish(self, block_id: int, content: BlockContent) -> None:
        """Add a full block to the prefix index, unless another block has the same content."""
        if self._index.insert(content, block_id) == block_id:
            self._contents[block_id] = content

    def _evict(self) -> int:
        block_id = self._oldest()
        del self._cached[block_id]
        self._index.evict(self._contents.pop(block_id))
        self._coverage.note(Situation.EVICTION)
        if block_id in self._was_shared:
            self._was_shared.remove(block_id)
            self._coverage.note(Situation.EVICTION_OF_SHARED)
        return block_id

    def _oldest(self) -> int:
        return next(iter(self._cached))
