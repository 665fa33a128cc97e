"""Joins partial answers of one group by their lse (rule S-8).

Axis 0 of the grid numbers the joins that the plan describes, axis 1 shares each out. A group that
parts of the grid cut is joined by all of them but its last: one cut into many parts is joined by
many programs. With fixed splits every query tile that has several is joined, by as many as the next
one. The last programs along axis 0 give padding ``(0, -inf)``.

The description leaves little to find out once the partials are there.

How the partials of a pair are added depends on their number alone (S-17, S-20).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.merge import close_sum
from paged_mla_optimized.kernels.common.schedule import (
    JOIN_ALIVE,
    JOIN_COUNT,
    JOIN_FIRST,
    JOIN_FIRST_PAIR,
    JOIN_ROOM,
    JOIN_SHARE,
    JOIN_SHARES,
    JOIN_START,
    JOIN_WORDS,
)
from paged_mla_optimized.kernels.common.token_head import (
    Answers,
    Lines,
    Partials,
    line_at,
    line_ptr,
)


class _Group(NamedTuple):
    """A group that is joined, as the words of a join say it, and the share of this program."""

    first: tl.tensor
    count: tl.tensor
    start: tl.tensor
    first_pair: tl.tensor
    alive: tl.tensor
    share: tl.tensor  # of those of all programs along axis 1
    shares: tl.tensor
    room: tl.tensor


@triton.jit
def _blank(token, is_padding_ptr, answers, num_tokens, num_heads, R: tl.constexpr):
    """Write (0, -inf) for a token that is padding."""
    is_padding = tl.load(is_padding_ptr + token, mask=token < num_tokens, other=0)
    line = token.to(tl.int64)
    if is_padding != 0:
        zeros = tl.zeros([R], answers.out.ptr.dtype.element_ty)
        for head in range(num_heads):
            at = line_at(answers.out, line, head)
            tl.store(answers.out.ptr + at + tl.arange(0, R), zeros)
            at = line_at(answers.lse, line, head)
            tl.store(answers.lse.ptr + at, float("-inf"))


@triton.jit
def _join(
    group, answers, pair, live, column, R: tl.constexpr, PLACES: tl.constexpr,
    PAIRS: tl.constexpr, SOURCES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return out [PAIRS, COLUMNS] and lse [PAIRS], from SOURCES partials at a time."""
    acc = tl.zeros([PAIRS, COLUMNS], tl.float32)
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    for begin in range(0, group.count, SOURCES):
        source = begin + tl.arange(0, SOURCES)
        # The first of a part's places holds what it goes on with, see ``partial_of_program``.
        slot = (group.first + source) * PLACES + tl.where(source == 0, PLACES - 1, 0)
        at = (slot.to(tl.int64) * group.room)[None, :] + pair[:, None]  # [PAIRS, SOURCES]
        inside = (source < group.count)[None, :] & live[:, None]
        lse = tl.load(answers.partial_lse_ptr + at, mask=inside, other=float("-inf"))
        out_at = answers.partial_out_ptr + at[:, :, None] * R + column[None, None, :]
        out = tl.load(out_at, mask=inside[:, :, None], other=0.0).to(tl.float32)
        out = tl.where((lse == float("-inf"))[:, :, None], 0.0, out)  # it may hold anything
        new_peak = tl.maximum(peak, tl.max(lse, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp(lse - shift[:, None])
        keep = tl.exp(peak - shift)
        total = total * keep + tl.sum(weight, axis=1)
        acc = acc * keep[:, None] + tl.sum(weight[:, :, None] * out, axis=1)
        peak = new_peak
    return close_sum(acc, total, peak)


@triton.jit
def _join_share(
    group, answers, num_heads, R: tl.constexpr, PLACES: tl.constexpr, SOURCES: tl.constexpr
):
    """Join every `shares`-th piece of the `alive` pairs of a group, SOURCES partials at a time."""
    # As many loads with any SOURCES, and whole lines of memory.
    PAIRS: tl.constexpr = max(32 // SOURCES, 1)
    COLUMNS: tl.constexpr = min(2048 // (PAIRS * SOURCES), R)
    pieces = R // COLUMNS
    for piece in range(group.share, tl.cdiv(group.alive, PAIRS) * pieces, group.shares):
        pair = piece // pieces * PAIRS + tl.arange(0, PAIRS)
        column = piece % pieces * COLUMNS + tl.arange(0, COLUMNS)
        live = pair < group.alive
        out, lse = _join(group, answers, pair, live, column, R, PLACES, PAIRS, SOURCES, COLUMNS)
        token = (group.start + (group.first_pair + pair) // num_heads).to(tl.int64)
        head = ((group.first_pair + pair) % num_heads).to(tl.int64)
        at = line_at(answers.out, token, head)
        out = out.to(answers.out.ptr.dtype.element_ty)
        tl.store(answers.out.ptr + at[:, None] + column[None, :], out, mask=live[:, None])
        if piece % pieces == 0:
            tl.store(line_ptr(answers.lse, token, head), lse, mask=live)


@triton.jit
def _join_group(group, answers, num_heads, R: tl.constexpr, PLACES: tl.constexpr):
    """Join a share of a group, with 4, 16 or 64 partials at a time.

    More would leave less than a line of memory for each. Other sizes would be more code, and a
    program waits for code too: it runs most of it once.
    """
    if group.count <= 4:
        _join_share(group, answers, num_heads, R, PLACES, 4)
    elif group.count <= 16:
        _join_share(group, answers, num_heads, R, PLACES, 16)
    else:
        _join_share(group, answers, num_heads, R, PLACES, 64)


@triton.jit(do_not_specialize=["joins", "num_tokens", "stride_lse_token",
                               "stride_lse_head"])  # fmt: skip
def combine_kernel(
    joins_ptr,  # int32 [joins, 8]
    is_padding_ptr,  # int8 [T]
    partials: Partials,  # float32 or the type of answers
    out: Lines,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    stride_lse_token,
    stride_lse_head,
    joins,  # programs along axis 0 that join
    num_tokens,
    num_heads,
    R: tl.constexpr,
    PLACES: tl.constexpr,  # partials that a part may leave; 1: fixed splits, numbered one by one
    OVERLAP: tl.constexpr,  # launched while the attend kernel still runs
):
    answers = Answers(out, Lines(lse_ptr, stride_lse_token, stride_lse_head), *partials)
    program = tl.program_id(0)
    worker = tl.program_id(1)
    workers = tl.num_programs(1)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if program >= joins:
        _blank(
            (program - joins) * workers + worker, is_padding_ptr, answers, num_tokens, num_heads, R,
        )  # fmt: skip
        return

    join_ptr = joins_ptr + program * JOIN_WORDS
    group = _Group(
        tl.load(join_ptr + JOIN_FIRST),
        tl.load(join_ptr + JOIN_COUNT),
        tl.load(join_ptr + JOIN_START),
        tl.load(join_ptr + JOIN_FIRST_PAIR),
        tl.load(join_ptr + JOIN_ALIVE),
        tl.load(join_ptr + JOIN_SHARE) * workers + worker,
        tl.load(join_ptr + JOIN_SHARES) * workers,
        tl.load(join_ptr + JOIN_ROOM),
    )
    if OVERLAP:
        # For the partials. One program waits in any case, so that this kernel, and what waits for
        # it, ends after the attend kernel.
        is_first = program + worker == 0
        if (group.count > 0) | is_first:
            tl.extra.cuda.gdc_wait()
    if group.count > 0:
        _join_group(group, answers, num_heads, R, PLACES)
