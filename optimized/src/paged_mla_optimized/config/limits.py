"""The largest sizes that configurations may have, with the reason for each limit."""

from __future__ import annotations

MAX_HEADS = 128
"""Query heads on one rank, which is all of DeepSeek-V3. Kernels are compiled for each number."""

MAX_ROWS = 2**15 - 2
"""Rows of a step. One program of the plan kernel loads them and two more entries as one tensor,
whose size is a power of two. Triton takes minutes to compile a larger tensor, and it rejects more
than 2 ** 20 elements."""

MAX_TOKENS = 2**23
"""Query tokens of a step. Kernels count pairs of token and head in int32, rounded up to tiles."""

MAX_MODEL_LEN = 2**30
"""Tokens of a row. Kernels count them in int32, rounded up to key tiles."""

MAX_BLOCK_SIZE = 2**15
"""Tokens of a block. Kernels multiply them in int32 by the number of scales of a block."""

MAX_DRAFT_TOKENS = 1024
"""Nodes of a draft tree. Kernels have one load for every 32 nodes, in loops that are unrolled."""

MAX_TABLE_MULTIPLE = 2**20
"""The multiple to which the width of a built block table is rounded up; the width fits int32."""

MAX_DRAFT_TABLE = 512 * (2**16 - 1)
"""Columns of the block table of drafts: 512 for each program along the second axis of the grid,
which has at most 65535 programs."""


def largest_power_of_two(most: int) -> int:
    """Return the largest power of two that is at most `most`, or 1 if `most` is 0."""
    return 1 << max(most.bit_length() - 1, 0)
