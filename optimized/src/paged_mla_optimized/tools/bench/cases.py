"""The cases that are timed: decode and verification steps with DeepSeek-V3's dims in bfloat16."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

R, P = 512, 64


@dataclass(frozen=True)
class Case:
    """One step, with rows of equal or of different lengths.

    Parameters
    ----------
    name : str
    num_heads, query_len : int
        H, and the number of query tokens of every row.
    seq_lens : tuple of int
        The number of keys of each row.
    block_size : int
    is_tree : bool
        Whether the queries of a row are a draft tree instead of a chain.
    """

    name: str
    num_heads: int
    query_len: int
    seq_lens: tuple[int, ...]
    block_size: int = 64
    is_tree: bool = False

    @property
    def flops(self) -> int:
        """Twice the number of multiply-adds, with masked keys counted too."""
        return 2 * self.num_heads * self.query_len * sum(self.seq_lens) * (2 * R + P)

    @property
    def bytes(self) -> int:
        """The bytes of all keys, queries and outputs, each counted once."""
        pairs = len(self.seq_lens) * self.query_len * self.num_heads
        return 2 * (sum(self.seq_lens) * (R + P) + pairs * (2 * R + P))


def _even(heads: int, queries: int, rows: int, length: int, block_size: int = 64) -> Case:
    suffix = "" if block_size == 64 else f" block {block_size}"
    name = f"h{heads} q{queries} b{rows} s{length}{suffix}"
    return Case(name, heads, queries, (length,) * rows, block_size)


def _ragged(heads: int) -> Case:
    draw = random.Random(7)
    low, high = math.log(256), math.log(32768)
    lens = tuple(int(math.exp(draw.uniform(low, high))) for _ in range(64))
    return Case(f"h{heads} q1 b64 ragged 256..32k", heads, 1, lens)


MAIN = (
    _even(128, 1, 128, 4096),
    _even(128, 2, 128, 8192),
    _even(128, 1, 1, 8192),
    _ragged(128),
    _even(64, 1, 64, 16384),
    _even(16, 1, 128, 8192),
    _even(16, 1, 256, 1024),
    _even(16, 1, 1, 32768),
    _even(16, 4, 32, 8192),
    _ragged(16),
    _even(16, 1, 8, 4096),
    _even(32, 1, 32, 16384),
)
PAIRS = (  # 32 pairs of query token and head in a row
    _even(32, 1, 32, 16384),
    _even(32, 1, 8, 4096),
    _even(32, 1, 128, 2048),
    _even(16, 2, 17, 20000),
    _even(16, 2, 64, 4096),
)
BLOCKS = tuple(_even(h, 1, 64, 8192, size) for h in (16, 128) for size in (1, 16, 32, 128))
HEADS = tuple(
    _even(heads, 1, 64, 8192) for heads in (6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
)
TREES = (
    _even(16, 8, 32, 8192),
    Case("h16 tree8 b32 s8192", 16, 8, (8192,) * 32, is_tree=True),
)
LENGTHS = tuple(_even(16, 1, 32, 128 << step) for step in range(0, 11, 2))
FP8 = (  # cases for flat FP8 caches
    *(case for case in MAIN if case.num_heads in {16, 128}),
    _even(32, 1, 32, 16384),
    _even(16, 1, 32, 131072),
    _even(16, 1, 64, 8192, 16),
    _even(16, 1, 64, 8192, 1),
    _even(64, 1, 64, 16384),
)
FORMATTED = (  # cases for every FP8 format
    _even(16, 1, 128, 8192),
    _ragged(16),
    _even(32, 1, 32, 16384),
    _even(128, 1, 128, 4096),
    _ragged(128),
)
GROUPS = {
    "main": MAIN,
    "pairs": PAIRS,
    "blocks": BLOCKS,
    "heads": HEADS,
    "trees": TREES,
    "lengths": LENGTHS,
}
