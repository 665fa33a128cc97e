"""Lines of a tensor [T, H, ..], and where answers go."""

from typing import NamedTuple

import triton
import triton.language as tl


class Lines(NamedTuple):
    """A tensor [T, H, ..], contiguous along the rest."""

    ptr: tl.tensor
    stride_token: tl.tensor
    stride_head: tl.tensor


class Partials(NamedTuple):
    """Where answers go that are joined later."""

    out_ptr: tl.tensor  # [tiles, TILE_M, R]
    lse_ptr: tl.tensor  # float32 [tiles, TILE_M]


class Answers(NamedTuple):
    """Where answers go."""

    out: Lines  # [T, H, R]
    lse: Lines  # float32 [T, H]
    partial_out_ptr: tl.tensor  # [tiles, TILE_M, R]; None where there are no partials
    partial_lse_ptr: tl.tensor  # float32 [tiles, TILE_M]


@triton.jit
def line_at(lines, token, head):
    """Return at which element the line of a token and head begins."""
    return token * lines.stride_token + head * lines.stride_head


@triton.jit
def line_ptr(lines, token, head):
    """Return where the line of a token and head begins."""
    return lines.ptr + token * lines.stride_token + head * lines.stride_head
