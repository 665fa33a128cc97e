"""Join the partial results of each group of query tiles by their lse (rule S-8).

Axis 0 of the grid has one program for each join record of the plan, and axis 1 divides each join
among several programs. If several parts of the grid share a group, all of these parts except the
last one have a join record for it, so that many programs join a group that is cut into many parts.
With fixed splits, each query tile with several splits has the same number of join records, or one
more. The last programs along axis 0 write ``(0, -inf)`` for the tokens that are padding.

The plan writes the join records before the attend kernel runs, so that a program here needs few
loads after the partial results are complete. The order in which the partial results of a pair are
added depends on their number alone (S-17, S-20).

With OVERLAP this kernel starts while the attend kernel still runs. Programs with a join, and the
first program in any case, wait for the end of the attend kernel (``gdc_wait``).
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
    """The words of a join record (``schedule.py``), and the share of this program."""

    first: tl.tensor
    count: tl.tensor
    start: tl.tensor
    first_pair: tl.tensor
    alive: tl.tensor
    share: tl.tensor  # number of this program among all that join the group, along both axes
    shares: tl.tensor  # number of these programs
    room: tl.tensor


@triton.jit
def _blank(token, is_padding_ptr, answers, num_tokens, num_heads, R: tl.constexpr):
    """Write ``out`` 0 and ``lse`` -inf for all heads of `token` if it is padding."""
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
    """Return out [PAIRS, COLUMNS] and lse [PAIRS]; load SOURCES partial results at a time."""
    acc = tl.zeros([PAIRS, COLUMNS], tl.float32)
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    for begin in range(0, group.count, SOURCES):
        source = begin + tl.arange(0, SOURCES)
        # The first place of a part stores the group that it continues, the last place the group
        # that it starts: see ``partial_of_program``.
        slot = (group.first + source) * PLACES + tl.where(source == 0, PLACES - 1, 0)
        at = (slot.to(tl.int64) * group.room)[None, :] + pair[:, None]  # [PAIRS, SOURCES]
        inside = (source < group.count)[None, :] & live[:, None]
        lse = tl.load(answers.partial_lse_ptr + at, mask=inside, other=float("-inf"))
        out_at = answers.partial_out_ptr + at[:, :, None] * R + column[None, None, :]
        out = tl.load(out_at, mask=inside[:, :, None], other=0.0).to(tl.float32)
        out = tl.where((lse == float("-inf"))[:, :, None], 0.0, out)  # `out` may be NaN there
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
    """Join every `shares`-th piece of a group, with SOURCES partial results at a time.

    A piece is PAIRS pairs by COLUMNS columns.
    """
    # A piece has the same number of loads for each SOURCES, and reads whole lines of memory.
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
    """Join this program's share of a group, with 4, 16 or 64 partial results at a time.

    With more than 64, each load would read less than a line of memory. More sizes would mean more
    code. A program executes most of its code once, so it also waits for the code to be fetched.
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
    joins_ptr,  # int32 [joins, JOIN_WORDS], see ``schedule.py``
    is_padding_ptr,  # int8 [T]
    partials: Partials,  # `out` is float32 or the type of outputs
    out: Lines,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    stride_lse_token,
    stride_lse_head,
    joins,  # programs along axis 0 that join
    num_tokens,
    num_heads,
    R: tl.constexpr,
    PLACES: tl.constexpr,  # partials that a part may write; 1 with fixed splits
    OVERLAP: tl.constexpr,  # this kernel starts while the attend kernel still runs
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
        # The programs wait for the partial results. The first program waits in any case, so that
        # this kernel, and each kernel that waits for it, ends after the attend kernel.
        is_first = program + worker == 0
        if (group.count > 0) | is_first:
            tl.extra.cuda.gdc_wait()
    if group.count > 0:
        _join_group(group, answers, num_heads, R, PLACES)
