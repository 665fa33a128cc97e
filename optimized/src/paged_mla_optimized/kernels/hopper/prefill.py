"""Attention of whole prompts on Hopper, over keys and values of each head (rules S-4 to S-7).

An item is one query tile of 128 tokens of one head (``common/prefill_plan.py``). The grid has a
fixed number of programs. Each program works on one item after another. Its first item has the
number of the program. Near the end of each item it claims the next one with an atomic counter, so
that the first free program takes the longest remaining item.

A program has three warp groups. One copies (``_copy``), with a ring of two blocks of 128 keys and
two blocks of values. Each of the other two computes 64 queries of the tile (``_compute``). They
process the blocks of a tile from the last one to the first, so that masked blocks come first. In
step `g` a computing warp group issues `QK` of block `g` and `PV` of block `g - 1`. Its softmax of
block `g` runs at the same time as this `PV` and the products of the other warp group. Steps are
counted across tiles: the first `QK` of a tile runs at the same time as the last `PV` of the tile
before. The two warp groups issue their products alternately, half a step apart.

Each barrier completes when the statement in the table is true:

==================  ==========================================================================
``k_full``          the keys of a block are loaded
``v_full``          the values of a block are loaded
``k_read0``, ``1``  one warp group has read the keys of a block
``v_read``          both warp groups have read the values of a block
``q_full``          the queries of a warp group are loaded
``named``           the next item is stored in shared memory
``turn0``, ``1``    one warp group may issue its products
==================  ==========================================================================

The barriers are separate arrays, because one common array would cost two more barriers of warps in
each step.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from paged_mla_optimized.kernels.common.prefill_plan import (
    CLAIMED,
    STOPPED,
    find_item,
    load_tile,
    load_work,
)
from paged_mla_optimized.kernels.common.token_head import Answers, Lines, line_at, line_ptr
from paged_mla_optimized.kernels.hopper.keys import clear_tail
from paged_mla_optimized.kernels.hopper.softmax import (
    FLOOR,
    answer_factor,
    answer_lse,
    own_sums,
    raised,
)
from paged_mla_optimized.triton_compat.gluon_names import copy_box, thread_barrier

_ITEMS = gl.constexpr(8)  # more than are in use at a time: one is stored, up to three are loaded
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_HALVES = gl.constexpr("mov.b32 {$0, $1}, $2;")
# The number of places for the fields of an item in shared memory, and the place of each field.
_FIELDS = gl.constexpr(8)
_HEAD = gl.constexpr(0)
_TOKEN = gl.constexpr(1)
_COUNT = gl.constexpr(2)  # number of tokens; 0 means that there are no more items
_KEY_START = gl.constexpr(3)
_KEY_LEN = gl.constexpr(4)
_CONTEXT = gl.constexpr(5)

# The layout in which outputs are stored: each thread has eight columns, which are 16 bytes. The
# conversion to it moves values within quads of threads.
_WIDE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)


class _Source(NamedTuple):
    """The descriptors of queries, keys and values, and strides of heads in columns."""

    q_nope_desc: gl.tensor
    q_pe_desc: gl.tensor
    k_nope_desc: gl.tensor
    k_pe_desc: gl.tensor
    v_desc: gl.tensor
    stride_q_nope_head: gl.tensor
    stride_q_pe_head: gl.tensor
    stride_k_nope_head: gl.tensor
    stride_v_head: gl.tensor


class _Queries(NamedTuple):
    """The queries of both computing warp groups in shared memory, and their barriers."""

    nope: gl.shared_memory_descriptor  # [2, 64, 128]
    pe: gl.shared_memory_descriptor  # [2, 64, 64]
    full: gl.shared_memory_descriptor  # barriers [2, 1]


class _Ring(NamedTuple):
    """Two blocks of keys and two blocks of values in shared memory, and their barriers."""

    k_nope: gl.shared_memory_descriptor  # [2, 128, 128]
    k_pe: gl.shared_memory_descriptor  # [2, 128, 64]
    v: gl.shared_memory_descriptor  # [2, 128, 128]
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    k_read0: gl.shared_memory_descriptor
    k_read1: gl.shared_memory_descriptor
    v_read: gl.shared_memory_descriptor


class _Items(NamedTuple):
    """The items of this program in shared memory: a ring of _ITEMS items."""

    fields: gl.shared_memory_descriptor  # int32 [_ITEMS * _FIELDS, 1]
    named: gl.shared_memory_descriptor  # barriers [_ITEMS, 1]


class _Turns(NamedTuple):
    """The barriers with which the two computing warp groups alternate."""

    mine: gl.shared_memory_descriptor  # this warp group may issue its products
    theirs: gl.shared_memory_descriptor  # the other warp group may issue its products


@gluon.jit
def _blocks_of(count, key_len, context, CAUSAL: gl.constexpr):
    """Return how many blocks of keys a tile processes: at least one, even if it sees no key."""
    seen = key_len
    if CAUSAL:
        seen = gl.minimum(context + count, key_len)
    return gl.maximum((seen + 127) // 128, 1)


@gluon.jit
def _hide(s, limit):
    """Return `s` where column <= limit of the row, and -inf elsewhere.

    The columns of a thread are constants plus twice its place in the quad. The function subtracts
    this place from the limit, so that each score needs one comparison and one select.
    """
    eights: gl.constexpr = s.shape[1] // 8
    x = gl.reshape(s, [64, eights, 4, 2])
    layout: gl.constexpr = x.type.layout
    of_pair: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    quad = gl.arange(0, 4, layout=gl.SliceLayout(0, of_pair))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, of_pair))[:, None] - 2 * quad[None, :]
    limit = gl.expand_dims(gl.expand_dims(limit, 1), 3)
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    of_two: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    eight = 8 * gl.arange(0, eights, layout=of_eight)
    eight = gl.expand_dims(gl.expand_dims(gl.expand_dims(eight, 0), 2), 3)
    two = gl.arange(0, 2, layout=of_two)
    two = gl.expand_dims(gl.expand_dims(gl.expand_dims(two, 0), 1), 2)
    x = gl.where(eight + two <= limit, x, float("-inf"))
    return gl.convert_layout(gl.reshape(x, s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def _limits(first, layout: gl.constexpr):
    """Return first + 0, 1, .. [64], computed in assembly.

    Otherwise the compiler would spill the terms of the sum at the start of the role.
    """
    return gl.inline_asm_elementwise(
        "add.s32 $0, $1, $2;", "=r,r,r",
        [gl.full([64], first, gl.int32, layout), gl.arange(0, 64, layout=layout)],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _pack(weights, DTYPE: gl.constexpr):
    """Return weights, rounded to 16 bits, as pairs in an int32.

    The compiler shuffles 16-bit values that a loop carries.
    """
    low, high = gl.split(gl.reshape(weights, [64, weights.shape[1] // 2, 2]))
    if gl.bfloat16 == DTYPE:
        convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        convert: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(
        convert, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _unpack(pairs, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Return the weights that ``_pack`` packed, as DTYPE in `layout`."""
    if gl.bfloat16 == DTYPE:  # Triton 3.8 does not accept types from a separate constexpr
        low, high = gl.inline_asm_elementwise(
            _HALVES, "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            _HALVES, "=h,=h,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    return gl.convert_layout(gl.reshape(gl.join(low, high), [64, 128]), layout, assert_trivial=True)


@gluon.jit
def _with_zeros(pairs, layout: gl.constexpr):
    """Return pairs [64, 32] of 64 keys, followed by the same number of zeros: [64, 64]."""
    both = gl.permute(gl.join(pairs, gl.zeros_like(pairs)), (0, 2, 1))
    return gl.convert_layout(gl.reshape(both, [64, 64]), layout, assert_trivial=True)


@gluon.jit
def _rescaled(acc, keep):
    """Return acc * keep; the multiplication is predicated off if `keep` is 1, as it mostly is."""
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.neu.f32 p, $2, 0f3F800000; mov.b32 $0, $1; @p mul.f32 $0, $1, $2;}",
        "=f,f,f", [acc, keep], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _put(items, item, FIELD: gl.constexpr, value):
    """Store one field of the `item`-th item of this program."""
    place = items.fields.index((item & (_ITEMS - 1)) * _FIELDS + FIELD)
    place.store(gl.full([1], value, gl.int32, _ONE))


@gluon.jit
def _get(items, item, FIELD: gl.constexpr):
    """Return one field of the `item`-th item of this program."""
    return gl.max(items.fields.index((item & (_ITEMS - 1)) * _FIELDS + FIELD).load(_ONE), 0)


@gluon.jit
def _name_item(num_tiles, group_heads, num_heads, num_keys, claimed, tiles_ptr, items, item):
    """Store the `item`-th item of this program, item `claimed` of all, for all roles."""
    tile, head = find_item(num_tiles, group_heads, claimed, num_heads)
    token, count, key_start, key_len, context = load_tile(tiles_ptr, tile, num_keys)
    _put(items, item, _HEAD, head)
    _put(items, item, _TOKEN, token)
    _put(items, item, _COUNT, count)
    _put(items, item, _KEY_START, key_start)
    _put(items, item, _KEY_LEN, key_len)
    _put(items, item, _CONTEXT, context)
    mbarrier.arrive(items.named.index(item & (_ITEMS - 1)))


@gluon.jit
def _next_count(items, item):
    """Wait for the `item`-th item of this program; return its number of tokens, 0 at the end."""
    mbarrier.wait(items.named.index(item & (_ITEMS - 1)), (item // _ITEMS) & 1)
    return _get(items, item, _COUNT)


@gluon.jit
def _copy_queries(source, q, token, nope_column, pe_column, HALF: gl.constexpr):
    """Start to copy the queries of one computing warp group."""
    ready = q.full.index(HALF)
    line = token + 64 * HALF
    mbarrier.expect(ready, 64 * 384)
    copy_box(source.q_nope_desc, [line, nope_column], ready, q.nope.index(HALF))
    copy_box(source.q_pe_desc, [line, pe_column], ready, q.pe.index(HALF))


@gluon.jit
def _copy_keys(source, ring, g, at, column):
    """Start to copy the keys of block `g`, after both warp groups have read its slot."""
    slot = g & 1
    phase = ((g >> 1) & 1) ^ 1
    mbarrier.wait(ring.k_read0.index(slot), phase)
    mbarrier.wait(ring.k_read1.index(slot), phase)
    ready = ring.k_full.index(slot)
    mbarrier.expect(ready, 128 * 384)
    copy_box(source.k_nope_desc, [at, column], ready, ring.k_nope.index(slot))
    copy_box(source.k_pe_desc, [at, 0], ready, ring.k_pe.index(slot))


@gluon.jit
def _copy_values(source, ring, g, at, column):
    """Start to copy the values of block `g`, after both warp groups have read its slot."""
    slot = g & 1
    ready = ring.v_full.index(slot)
    mbarrier.wait(ring.v_read.index(slot), ((g >> 1) & 1) ^ 1)
    mbarrier.expect(ready, 128 * 256)
    copy_box(source.v_desc, [at, column], ready, ring.v.index(slot))


@gluon.jit
def _copy(source, q, ring, items, tiles_ptr, work_ptr, num_heads, num_keys, CAUSAL: gl.constexpr):
    """Claim items, and copy their queries, keys and values: the role of the copying warp group."""
    programs = gl.num_programs(0)
    num_tiles, group_heads = load_work(work_ptr)
    g = 0
    item = 0
    v_at = 0
    v_column = 0
    first = gl.program_id(0)
    _name_item(num_tiles, group_heads, num_heads, num_keys, first, tiles_ptr, items, item)
    count = _next_count(items, item)
    while count > 0:
        head = _get(items, item, _HEAD)
        token = _get(items, item, _TOKEN)
        key_start = _get(items, item, _KEY_START)
        key_len = _get(items, item, _KEY_LEN)
        context = _get(items, item, _CONTEXT)
        blocks = _blocks_of(count, key_len, context, CAUSAL)
        for block in range(blocks):
            at = key_start + (blocks - 1 - block) * 128
            _copy_keys(source, ring, g, at, head * source.stride_k_nope_head)
            if g > 0:  # after the keys of `g`, whose slot is free half a step earlier
                _copy_values(source, ring, g - 1, v_at, v_column)
            if block == 0:  # after each warp group has finished QK of the tile before
                before = (g - 1) & 1
                phase = ((g - 1) >> 1) & 1
                nope_column = head * source.stride_q_nope_head
                pe_column = head * source.stride_q_pe_head
                mbarrier.wait(ring.k_read0.index(before), phase, pred=g > 0)
                _copy_queries(source, q, token, nope_column, pe_column, 0)
                mbarrier.wait(ring.k_read1.index(before), phase, pred=g > 0)
                _copy_queries(source, q, token, nope_column, pe_column, 1)
            # If programs claimed earlier, all of them would have claimed their second items before
            # the programs with short first items are free. If they claimed later, the copies would
            # wait for the result of the atomic operation.
            if block == gl.maximum(blocks - 2, 0):
                claimed = gl.atomic_add(work_ptr + CLAIMED, 1) + programs
                _name_item(
                    num_tiles, group_heads, num_heads, num_keys, claimed, tiles_ptr, items, item + 1
                )
            v_at = at
            v_column = head * source.stride_v_head
            g += 1
        item += 1
        count = _next_count(items, item)
    if g > 0:
        _copy_values(source, ring, g - 1, v_at, v_column)
        slot = g & 1
        mbarrier.wait(ring.k_read0.index(slot), ((g >> 1) & 1) ^ 1)
        mbarrier.wait(ring.k_read1.index(slot), ((g >> 1) & 1) ^ 1)
        mbarrier.arrive(ring.k_full.index(slot))  # the last step waits for one more block
    # The last program to stop resets the counts for the next launch.
    if gl.atomic_add(work_ptr + STOPPED, 1) == programs - 1:
        gl.store(work_ptr + CLAIMED, 0)
        gl.store(work_ptr + STOPPED, 0)


@gluon.jit
def _k_read(ring, HALF: gl.constexpr):
    """Return the barriers at which a computing warp group arrives after it has read keys."""
    return ring.k_read0 if HALF == 0 else ring.k_read1


@gluon.jit
def _step(
    acc, peak, total, pairs, g, key, limit, q, ring, turns, scale: gl.constexpr,
    HALF: gl.constexpr, MASK: gl.constexpr, FIRST: gl.constexpr, KEYS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Compute `QK` and the softmax of block `g`, and `PV` of block `g - 1` at the same time.

    `pairs` are the packed weights of block `g - 1`. The function computes the scores of the first
    KEYS keys of block `g`, 64 or 128. With FIRST `acc` belongs to the tile before. Returns the sums
    `acc`, the peak, the own sums of weights, and the packed weights of block `g`.
    """
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    weights = _unpack(pairs, ring.v.dtype, gl.DotOperandLayout(0, layout, 2))
    slot = g & 1
    before = slot ^ 1
    mbarrier.wait(turns.mine, (g & 1) ^ (1 if HALF == 0 else 0))
    s = gl.zeros([64, KEYS], gl.float32, s_layout)
    keys = ring.k_nope.index(slot).slice(0, KEYS, dim=0)
    s = warpgroup_mma(q.nope.index(HALF), keys.permute((1, 0)), s, use_acc=False, is_async=True)
    keys = ring.k_pe.index(slot).slice(0, KEYS, dim=0)
    s = warpgroup_mma(q.pe.index(HALF), keys.permute((1, 0)), s, is_async=True)
    mbarrier.wait(ring.v_full.index(before), ((g - 1) >> 1) & 1, pred=g > 0)
    acc = warpgroup_mma(weights, ring.v.index(before), acc, is_async=True)
    peak = warpgroup_mma_wait(3, deps=[peak])
    mbarrier.arrive(turns.theirs)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(_k_read(ring, HALF).index(slot))
    if FIRST:
        peak = gl.full([64], FLOOR, gl.float32, lines)
    if MASK:
        s = _hide(s, limit - key)
    highest = gl.convert_layout(gl.max(s, 1), lines, assert_trivial=True) * scale
    new_peak = raised(peak, highest)
    keep = gl.exp2(peak - new_peak)
    shift = gl.convert_layout(new_peak, gl.SliceLayout(1, s_layout), assert_trivial=True)
    p = gl.exp2(s * scale - shift[:, None])
    if FIRST:
        total = gl.convert_layout(own_sums(p), total.type.layout, assert_trivial=True)
    else:
        kept = gl.convert_layout(keep, gl.SliceLayout(1, total.type.layout))
        total = total * kept[:, None] + own_sums(p)
    if KEYS == 128:
        pairs = _pack(p, ring.v.dtype)
    else:
        of_pairs: gl.constexpr = pairs.type.layout
        pairs = _with_zeros(_pack(p, ring.v.dtype), of_pairs)
    # The wait for the next keys is here because of its branch: ptxas moves the wait for PV up to
    # the last branch before it. Without this branch the wait would be before the exponentials.
    mbarrier.wait(ring.k_full.index(before), ((g + 1) >> 1) & 1)
    acc, weights, pairs = warpgroup_mma_wait(0, deps=[acc, weights, pairs])
    mbarrier.arrive(ring.v_read.index(before), pred=g > 0)
    if not FIRST:
        kept, _ = gl.broadcast(keep[:, None], acc)
        acc = _rescaled(acc, kept)
    return acc, new_peak, total, pairs


@gluon.jit
def _pass_blocks(begin, end, ring, turns, HALF: gl.constexpr):
    """Wait and arrive at all barriers of steps [begin, end), for a warp group without queries."""
    for t in range(begin, end):
        before = (t & 1) ^ 1
        mbarrier.wait(turns.mine, (t & 1) ^ (1 if HALF == 0 else 0))
        mbarrier.arrive(turns.theirs)
        mbarrier.arrive(_k_read(ring, HALF).index(t & 1))
        mbarrier.wait(ring.v_full.index(before), ((t - 1) >> 1) & 1)
        mbarrier.arrive(ring.v_read.index(before))
        mbarrier.wait(ring.k_full.index(before), ((t + 1) >> 1) & 1)


@gluon.jit
def _clear_values(ring, g, valid):
    """Set the values of block `g` past the end of the row to 0, before the product with them.

    Both warp groups write the same zeros, so that neither waits for the other.
    """
    slot = g & 1
    mbarrier.wait(ring.v_full.index(slot), (g >> 1) & 1)
    clear_tail(ring.v.index(slot), valid, 128, 128, 4)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _finish(acc, peak, total, answers, items, item, HALF: gl.constexpr, layout: gl.constexpr):
    """Store out and lse of one half of the `item`-th item of this program."""
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    first = _get(items, item, _TOKEN)
    count = _get(items, item, _COUNT)
    head = _get(items, item, _HEAD).to(gl.int64)
    total = gl.convert_layout(gl.sum(total, 1), lines)
    is_empty = total == 0.0
    lse = answer_lse(is_empty, peak, total)
    index = HALF * 64 + gl.arange(0, 64, layout=lines)
    token = (first + index).to(gl.int64)
    at = line_ptr(answers.lse, token, head)
    gl.store(at, lse, mask=index < count)
    share = answer_factor(is_empty, total)
    out = answers.out
    answer = gl.convert_layout((acc * share[:, None]).to(out.ptr.dtype.element_ty), _WIDE)
    index = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, _WIDE))
    token = (first + index).to(gl.int64)
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, _WIDE))
    line = line_at(out, token, head)
    gl.store(out.ptr + line[:, None] + column[None, :], answer, mask=(index < count)[:, None])


@gluon.jit
def _compute(
    q, ring, items, turns, answers, scale: gl.constexpr, CAUSAL: gl.constexpr, HALF: gl.constexpr
):
    """Compute the attention of half of each tile's queries: the role of a computing warp group."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    g = 0
    item = 0
    acc = gl.zeros([64, 128], gl.float32, layout)
    peak = gl.full([64], FLOOR, gl.float32, lines)
    total = own_sums(acc)
    pairs = _pack(acc, ring.v.dtype)
    count = _next_count(items, item)
    mbarrier.wait(ring.k_full.index(0), 0, pred=count > 0)
    while count > 0:
        key_len = _get(items, item, _KEY_LEN)
        context = _get(items, item, _CONTEXT)
        blocks = _blocks_of(count, key_len, context, CAUSAL)
        mine = gl.minimum(count - 64 * HALF, 64)
        if CAUSAL:
            first = context + 64 * HALF
            limit = _limits(first, lines)
            seen_by_all = gl.maximum(first + 1, 0)
            seen_by_any = gl.minimum(first + mine, key_len)
        else:
            limit = gl.full([64], key_len - 1, gl.int32, lines)
            seen_by_all = key_len
            seen_by_any = key_len
        # A warp group without queries computes one block, to keep the order of the pipeline.
        works = mine > 0
        whole = gl.where(works, gl.minimum(seen_by_all // 128, blocks - 1), 0)
        end = gl.where(works, g + blocks, g + 1)
        last = g + blocks - 1
        last_key = (blocks - 1) * 128
        mbarrier.wait(q.full.index(HALF), item & 1)
        done_peak = peak
        done_total = total
        if seen_by_any <= last_key + 64:  # in long rows this is true for half of the warp groups
            acc, peak, total, pairs = _step(
                acc, peak, total, pairs, g, last_key, limit, q, ring, turns, scale, HALF, True,
                True, 64, layout,
            )  # fmt: skip
        else:
            acc, peak, total, pairs = _step(
                acc, peak, total, pairs, g, last_key, limit, q, ring, turns, scale, HALF, True,
                True, 128, layout,
            )  # fmt: skip
        if item > 0:
            _finish(acc, done_peak, done_total, answers, items, item - 1, HALF, layout)
        acc = gl.zeros([64, 128], gl.float32, layout)
        if key_len < last_key + 128:
            _clear_values(ring, g, key_len - last_key)
        for t in range(g + 1, end - whole):
            acc, peak, total, pairs = _step(
                acc, peak, total, pairs, t, (last - t) * 128, limit, q, ring, turns, scale, HALF,
                True, False, 128, layout,
            )  # fmt: skip
        for t in range(end - whole, end):
            acc, peak, total, pairs = _step(
                acc, peak, total, pairs, t, 0, limit, q, ring, turns, scale, HALF, False, False,
                128, layout,
            )  # fmt: skip
        _pass_blocks(end, g + blocks, ring, turns, HALF)
        g += blocks
        item += 1
        count = _next_count(items, item)
    if item > 0:
        weights = _unpack(pairs, ring.v.dtype, gl.DotOperandLayout(0, layout, 2))
        slot = (g - 1) & 1
        mbarrier.wait(ring.v_full.index(slot), ((g - 1) >> 1) & 1)
        acc = warpgroup_mma(weights, ring.v.index(slot), acc, is_async=True)
        acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
        _finish(acc, peak, total, answers, items, item - 1, HALF, layout)


@gluon.jit(do_not_specialize=["stride_lse_token", "stride_lse_head", "num_keys"])
def hopper_prefill_kernel(
    tiles_ptr,  # int32 [tiles, TILE_WORDS] of the prefill plan
    work_ptr,  # int32 [WORK_WORDS] of the prefill plan; the kernel counts claims in it
    out_ptr,  # [T, H, 128]
    lse_ptr,  # float32 [T, H]
    stride_q_nope_head,
    stride_q_pe_head,
    stride_k_nope_head,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    num_heads,
    num_keys,  # K
    q_nope_desc,  # [T, H * stride], in boxes [64, 128]
    q_pe_desc,  # [T, H * stride], in boxes [64, 64]
    k_nope_desc,  # [K, H * stride], in boxes [128, 128]
    k_pe_desc,  # [K, 64], in boxes [128, 64]
    v_desc,  # [K, H * stride], in boxes [128, 128]
    scale: gl.constexpr,  # scale of scores in units of log2
    CAUSAL: gl.constexpr,
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    layout: gl.constexpr = q_nope_desc.layout
    q_nope = gl.allocate_shared_memory(dtype, [2, 64, 128], layout)
    q_pe = gl.allocate_shared_memory(dtype, [2, 64, 64], layout)
    k_nope = gl.allocate_shared_memory(dtype, [2, 128, 128], layout)
    k_pe = gl.allocate_shared_memory(dtype, [2, 128, 64], layout)
    v = gl.allocate_shared_memory(dtype, [2, 128, 128], layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    fields = gl.allocate_shared_memory(gl.int32, [_ITEMS * _FIELDS, 1], flat)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_read0 = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_read1 = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    named = gl.allocate_shared_memory(gl.int64, [_ITEMS, 1], mbarrier.MBarrierLayout())
    turn0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    source = _Source(
        q_nope_desc, q_pe_desc, k_nope_desc, k_pe_desc, v_desc, stride_q_nope_head,
        stride_q_pe_head, stride_k_nope_head, stride_v_head,
    )  # fmt: skip
    q = _Queries(q_nope, q_pe, q_full)
    ring = _Ring(k_nope, k_pe, v, k_full, v_full, k_read0, k_read1, v_read)
    items = _Items(fields, named)
    answers = Answers(
        Lines(out_ptr, stride_out_token, stride_out_head),
        Lines(lse_ptr, stride_lse_token, stride_lse_head), None, None,
    )  # fmt: skip
    for slot in gl.static_range(2):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_read0.index(slot), count=1)
        mbarrier.init(k_read1.index(slot), count=1)
        mbarrier.init(v_read.index(slot), count=2)
        mbarrier.init(q_full.index(slot), count=1)
    for slot in gl.static_range(_ITEMS):
        mbarrier.init(named.index(slot), count=1)
    mbarrier.init(turn0, count=1)
    mbarrier.init(turn1, count=1)
    fence_async_shared()
    # This kernel starts while the kernel before it still runs, which may be the plan or another
    # kernel. No role starts before this wait. So the kernel reads the plan and the tensors, and
    # writes outputs and counts, only after all earlier kernels have ended. The next kernel starts
    # after this one has ended.
    gdc_wait()
    gl.warp_specialize(
        [
            (_copy, (source, q, ring, items, tiles_ptr, work_ptr, num_heads, num_keys, CAUSAL)),
            (_compute, (q, ring, items, _Turns(turn0, turn1), answers, scale, CAUSAL, 0)),
            (_compute, (q, ring, items, _Turns(turn1, turn0), answers, scale, CAUSAL, 1)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip
