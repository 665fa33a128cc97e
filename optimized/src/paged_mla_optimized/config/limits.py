"""The largest sizes that configurations may have, and what bounds each of them."""

from __future__ import annotations

MAX_HEADS = 128
"""Query heads on one rank, all of DeepSeek-V3. Kernels are compiled for every number up to it."""

MAX_ROWS = 2**15 - 2
"""Rows of a step. One program of the plan holds them, and two more, as a tensor whose size is a
power of two. Triton takes minutes to compile a larger one, and none of more than 2 ** 20."""

MAX_TOKENS = 2**23
"""Query tokens of a step. Kernels count pairs of token and head, rounded up to tiles, in int32."""

MAX_MODEL_LEN = 2**30
"""Tokens of a row. Kernels count them, rounded up to key tiles, in int32."""

MAX_BLOCK_SIZE = 2**15
"""Tokens of a block. Kernels multiply them by the scales of a block, one a token, in int32."""

MAX_DRAFT_TOKENS = 1024
"""Nodes of a draft tree. Kernels have one load for each 32 of them, in loops that are unrolled."""

MAX_TABLE_MULTIPLE = 2**20
"""Entries that a built block table is rounded up to, so that int32 counts those of a row."""

MAX_DRAFT_TABLE = 512 * (2**16 - 1)
"""Columns of the block table of drafts: 512 for each program along the grid's second axis, which
has at most 65535."""


def largest_power_of_two(most: int) -> int:
    """Return the largest power of two up to `most`, or 1."""
    return 1 << max(most.bit_length() - 1, 0)
