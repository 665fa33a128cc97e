"""Every error the rules promise, one smallest change to a good problem or step each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import DIMS, problem_of, request, scene

from paged_mla_reference.rules.masks import spell_mask
from paged_mla_reference.rules.validation.inputs import validate_batch, validate_problem
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

FORK = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
NEOX = RopePairing.NEOX


def test_the_standard_problem_is_good():
    """S-2: the problem that the tables below make illegal is legal without a change."""
    validate_problem(problem_of())
    validate_problem(problem_of(rope=Rope(NEOX, yarn=Yarn(40.0, 4096)), token_padding=8))
    validate_problem(problem_of(mask=Mask.TREE, max_draft_tokens=8))
    validate_problem(problem_of(cache_format="fp8_ds_mla", dtype="bfloat16", block_padding=3))


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("dtype", {"dtype": "float64"}),
        ("dtype", {"dtype": "float8_e4m3"}),
        ("cache_format", {"cache_format": "int4"}),
        ("cache_format", {"cache_format": "bf16"}),
        ("block_size", {"block_size": 0}),
        ("num_blocks", {"num_blocks": 0}),
        ("max_rows", {"max_rows": 0}),
        ("max_query_tokens", {"max_query_tokens": -1}),
        ("max_model_len", {"max_model_len": 0}),
        ("max_draft_tokens", {"max_draft_tokens": 1}),
        ("max_draft_tokens", {"max_draft_tokens": 0, "mask": Mask.TREE}),
        ("max_draft_tokens", {"max_draft_tokens": -1, "mask": Mask.TREE}),
        ("softmax_scale", {"softmax_scale": 0.0}),
        ("softmax_scale", {"softmax_scale": -1.0}),
        ("softmax_scale", {"softmax_scale": float("nan")}),
        ("softmax_scale", {"softmax_scale": float("inf")}),
        ("token_padding", {"token_padding": -4}),
        ("token_padding", {"token_padding": 2}),
        ("block_padding", {"block_padding": -4}),
        ("block_padding", {"block_padding": -1, "cache_format": "fp8_e4m3"}),
        ("block_padding", {"block_padding": 6}),
        ("rope.theta", {"rope": Rope(NEOX, theta=0.0)}),
        ("rope.theta", {"rope": Rope(NEOX, theta=1.0, yarn=Yarn(40.0, 4096))}),
        ("rope.yarn.factor", {"rope": Rope(NEOX, yarn=Yarn(-1.0, 4096))}),
        ("rope.yarn.original_max_position", {"rope": Rope(NEOX, yarn=Yarn(40.0, 0))}),
        ("rope.yarn.beta_slow", {"rope": Rope(NEOX, yarn=Yarn(40.0, 4096, beta_slow=1e-320))}),
        ("rope.yarn.mscale_all_dim", {"rope": Rope(NEOX, yarn=Yarn(40.0, 1, mscale_all_dim=-1.0))}),
        ("rope.pairing", {"rope": Rope("gptj")}),
        ("num_heads", {"dims": replace(DIMS, num_heads=0)}),
        ("num_heads", {"dims": replace(DIMS, num_heads=True)}),
        ("block_size", {"block_size": 16.0}),
        ("max_rows", {"max_rows": float("nan")}),
        ("max_draft_tokens", {"max_draft_tokens": False}),
        ("kv_lora_rank", {"dims": replace(DIMS, kv_lora_rank=0)}),
        ("qk_rope_head_dim", {"dims": replace(DIMS, qk_rope_head_dim=0)}),
        ("qk_rope_head_dim", {"dims": replace(DIMS, qk_rope_head_dim=3)}),
        ("qk_nope_head_dim", {"dims": replace(DIMS, qk_nope_head_dim=0)}),
        ("v_head_dim", {"dims": replace(DIMS, v_head_dim=-1)}),
    ],
)
def test_bad_problem(argument, changes):
    """S-5, S-11, S-12: a problem no runner can be built for."""
    _refused(argument, validate_problem, problem_of(**changes))


def _refused(argument, check, *args):
    with pytest.raises(InvalidArgument) as raised:
        check(*args)
    assert raised.value.argument == argument
    assert argument in str(raised.value)


def _good():
    """Rows of 9 tokens (2 new), 3 (3 new) and 5 (none new), blocks of 4."""
    return scene([request(9, 1), request(3, 2), request(5, 3)], [7, 0, 5])


def _i32(*values):
    return np.array(values, np.int32)


def _with_entry(row, column, value):
    def change(problem, batch):
        table = batch.block_table.copy()
        table[row, column] = problem.num_blocks if value == "past" else value
        return {"block_table": table}

    return change


def _with_block(place, source):
    """Put the block at `source` of the table at `place` too."""

    def change(_, batch):
        table = batch.block_table.copy()
        table[place] = table[source]
        return {"block_table": table}

    return change


def _name_a_slot_of_a_shared_block(problem, batch):
    table = batch.block_table.copy()
    table[1, 0] = table[0, 1]
    slot = int(table[1, 0]) * problem.block_size
    return {"block_table": table, "slot_mapping": np.array([-1, -1, slot, -1, -1])}


def _cast(field, dtype):
    return lambda _, batch: {field: getattr(batch, field).astype(dtype)}


def _cut(field, index):
    return lambda _, batch: {field: getattr(batch, field)[index]}


def _value(field, *values):
    return lambda _, batch: {field: np.array(values, getattr(batch, field).dtype)}


def _slots(*values, dtype=np.int64):
    return lambda *_: {"slot_mapping": np.array(values, dtype)}


BAD_BATCHES = {
    "q_nope-dtype": ("q_nope", _cast("q_nope", np.float16)),
    "q_nope-heads": ("q_nope", _cut("q_nope", np.s_[:, :1])),
    "q_nope-width": ("q_nope", _cut("q_nope", np.s_[..., :3])),
    "q_nope-two-axes": ("q_nope", _cut("q_nope", np.s_[:, 0])),
    "q_nope-scalar": ("q_nope", _cut("q_nope", (0, 0, 0))),
    "q_pe-dtype": ("q_pe", _cast("q_pe", np.float64)),
    "q_pe-tokens": ("q_pe", _cut("q_pe", np.s_[:-1])),
    "q_pe-width": ("q_pe", _cut("q_pe", np.s_[..., :1])),
    "ckv-dtype": ("ckv", _cast("ckv", np.float64)),
    "ckv-tokens": ("ckv", _cut("ckv", np.s_[1:])),
    "k_pe-dtype": ("k_pe", _cast("k_pe", np.float64)),
    "k_pe-width": ("k_pe", _cut("k_pe", np.s_[:, :1])),
    "seq_lens-dtype": ("seq_lens", _cast("seq_lens", np.int64)),
    "seq_lens-rows": ("seq_lens", _cut("seq_lens", np.s_[:2])),
    "seq_lens-negative": ("seq_lens", _value("seq_lens", 9, 3, -1)),
    "seq_lens-too-long": ("seq_lens", _value("seq_lens", 65, 3, 5)),
    "seq_lens-below-query": ("seq_lens", _value("seq_lens", 1, 3, 5)),
    "cu-dtype": ("cu_seqlens_q", _cast("cu_seqlens_q", np.int64)),
    "cu-empty": ("cu_seqlens_q", _cut("cu_seqlens_q", np.s_[:0])),
    "cu-first": ("cu_seqlens_q", _value("cu_seqlens_q", 1, 2, 5, 5)),
    "cu-decreasing": ("cu_seqlens_q", _value("cu_seqlens_q", 0, 3, 2, 5)),
    "cu-past-tokens": ("cu_seqlens_q", _value("cu_seqlens_q", 0, 2, 5, 6)),
    "table-dtype": ("block_table", _cast("block_table", np.int64)),
    "table-one-axis": ("block_table", _cut("block_table", 0)),
    "table-rows": ("block_table", _cut("block_table", np.s_[:2])),
    "table-narrow": ("block_table", _cut("block_table", np.s_[:, :2])),
    "table-negative": ("block_table", _with_entry(0, 2, -1)),
    "table-negative-context": ("block_table", _with_entry(2, 1, -1)),
    "table-past-cache": ("block_table", _with_entry(2, 1, "past")),
    "table-two-writers": ("block_table", _with_block((1, 0), (0, 2))),
    # row 1 writes to a block that is full of row 0's context
    "table-written-and-read": ("block_table", _with_block((1, 0), (0, 1))),
    "table-block-twice-in-a-row": ("block_table", _with_block((0, 1), (0, 0))),
    "slots-in-a-shared-block": ("slot_mapping", _name_a_slot_of_a_shared_block),
    "slots-dtype": ("slot_mapping", _slots(0, 1, 2, 3, 4, dtype=np.int32)),
    "slots-tokens": ("slot_mapping", _slots(0, 1, 2, 3)),
    "slots-below": ("slot_mapping", _slots(0, 1, 2, 3, -2)),
    "slots-past-cache": ("slot_mapping", _slots(0, 1, 2, 3, 4 * 14)),
    "slots-twice": ("slot_mapping", _slots(0, 1, 2, -1, 1)),
    "slots-zero-twice": ("slot_mapping", _slots(0, 1, 2, -1, 0)),
    "mask-unexpected": ("mask", lambda *_: {"mask": np.ones(13, bool)}),
}


def test_the_standard_step_is_good():
    """S-2: the step that the table above makes illegal is legal, also with explicit slots."""
    made = _good()
    assert made.problem.num_blocks == 14
    validate_batch(made.problem, made.batch)
    validate_batch(made.problem, replace(made.batch, **_slots(55, -1, -1, 0, 3)()))


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batch(name):
    """S-1, S-2, S-10, S-13: a step no rule allows."""
    argument, change = BAD_BATCHES[name]
    made = _good()
    spoilt = replace(made.batch, **change(made.problem, made.batch))
    _refused(argument, validate_batch, made.problem, spoilt)


@pytest.mark.parametrize(("argument", "most"), [("max_rows", 2), ("max_query_tokens", 4)])
def test_past_a_capacity(argument, most):
    """S-17: buffers are allocated once; a step that does not fit is refused."""
    made = _good()
    _refused(argument, validate_batch, replace(made.problem, **{argument: most}), made.batch)


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ("first entry 1", {"cu_seqlens_q": _i32(1, 2, 3, 4)}),
        ("last entry 9", {"cu_seqlens_q": _i32(0, 2, 3, 9)}),
        (
            "seq_lens: got 1 in row 0, whose query_len is 2; allowed: 0, or >= query_len unless",
            {"seq_lens": _i32(1, 2, 5)},
        ),
        (
            "block_table: got block 3 twice in row 0; allowed: each block at most once",
            {"block_table": np.array([[3, 2, 3], [4, 0, 0], [5, 6, 0]], np.int32)},
        ),
        (
            "block_table: got block 2 in rows 0 and 1, and this step writes to it; allowed: ",
            {"block_table": np.array([[3, 2, 1], [2, 0, 0], [5, 6, 0]], np.int32)},
        ),
    ],
    ids=["first", "last", "row", "twice", "shared"],
)
def test_messages_name_the_wrong_entry(given, changes):
    """S-2: the entry at fault is named, the first one of several."""
    made = _good()
    with pytest.raises(InvalidArgument, match=given):
        validate_batch(made.problem, replace(made.batch, **changes))


@pytest.mark.parametrize("mask", Mask)
def test_only_a_causal_row_needs_a_key_for_each_query(mask):
    """S-2: a row of 2 keys and 3 queries is refused unless its queries see all its keys."""
    tree = np.tri(3, dtype=bool).ravel() if mask is Mask.TREE else None
    made = scene([request(3, 1)], [0], mask=mask, tree=tree)
    short = replace(made.batch, seq_lens=_i32(2))
    if mask is Mask.NON_CAUSAL:
        validate_batch(made.problem, short)
    else:
        _refused("seq_lens", validate_batch, made.problem, short)


def test_what_may_hold_anything_is_not_checked():
    """S-9: table tails, the table and mask of padded rows, and shared read-only blocks are fine."""
    made = _good()
    table = made.batch.block_table.copy()
    table[2, :2] = table[0, :2]
    table[:, 3:] = table[:, :1]
    table[1] = -7
    padded = replace(made.batch, seq_lens=_i32(9, 0, 5), block_table=table)
    validate_batch(made.problem, padded)
    blind = np.zeros(9, bool)
    tree = scene([request(3, 1)], [0], mask=Mask.TREE, tree=blind)
    validate_batch(tree.problem, replace(tree.batch, seq_lens=_i32(0)))


def test_blocks_of_rows_without_queries_may_be_written():
    """S-13: no query reads such a row; engines leave tables there whose blocks are reused."""
    made = _good()
    table = made.batch.block_table.copy()
    table[2, 0] = table[0, 2]
    validate_batch(made.problem, replace(made.batch, block_table=table))


def test_a_slot_may_be_named_in_a_block_of_any_one_row():
    """S-10, S-13: named slots come in any order, and a block of one row is not shared."""
    made = _good()
    slot = int(made.batch.block_table[1, 0]) * made.problem.block_size
    slots = np.array([slot, -1, -1, -1, -1])
    validate_batch(made.problem, replace(made.batch, slot_mapping=slots))


def test_queries_of_one_request_may_be_rows_where_slots_are_named():
    """S-13, S-18: this occurs on a rank of a divided cache; derived slots do not allow it."""
    made = _good()
    table = np.array([[3, 2, 1], [3, 2, 1], [5, 6, 0]], np.int32)
    batch = replace(made.batch, block_table=table, seq_lens=_i32(9, 10, 5))
    batch = replace(batch, cu_seqlens_q=_i32(0, 1, 2, 2))
    named = np.array([4, 5, -1, -1, -1])
    validate_batch(made.problem, replace(batch, slot_mapping=named))
    _refused("block_table", validate_batch, made.problem, batch)
    batch = replace(batch, block_table=np.array([[3, 2, 1], [2, 3, 1], [5, 6, 0]], np.int32))
    _refused("slot_mapping", validate_batch, made.problem, replace(batch, slot_mapping=named))


def _tree(spelling, mask=None, *, drafts=64):
    """A row of 2 + 3 tokens and one of 3 + 1."""
    made = scene([request(5, 1), request(4, 2)], [2, 3], mask=Mask.TREE)
    problem = replace(made.problem, mask_spelling=spelling, max_draft_tokens=drafts)
    if mask is None:
        trees = [FORK, np.eye(1, dtype=bool)]
        mask = spell_mask(trees, spelling, made.batch.seq_lens, drafts)
    return problem, replace(made.batch, mask=mask)


@pytest.mark.parametrize("spelling", MaskSpelling)
def test_the_standard_trees_are_good(spelling):
    """S-14: the trees that the table below makes illegal are legal without a change."""
    validate_batch(*_tree(spelling))


def _bits(text):
    return np.array([c == "1" for c in text.replace(" ", "")])


QLEN, FULL, PACKED = MaskSpelling.QLEN, MaskSpelling.FULL, MaskSpelling.PACKED
BAD_MASKS = {
    "qlen-short": (QLEN, _bits("100 110 101")),
    "qlen-long": (QLEN, _bits("100 110 101 1 0")),
    "qlen-two-axes": (QLEN, np.ones((1, 10), bool)),
    "qlen-dtype": (QLEN, _bits("100 110 101 1").astype(np.uint8)),
    "qlen-blind-node": (QLEN, _bits("100 100 101 1")),
    "qlen-later-node": (QLEN, _bits("110 110 101 1")),
    "full-as-qlen": (FULL, _bits("100 110 101 1")),
    "full-false-context": (FULL, _bits("11100 01110 11101 1111")),
    "full-blind-node": (FULL, _bits("11100 11110 11101 1110")),
    "packed-dtype": (PACKED, np.full((4, 8), -1, np.int8)),
    "packed-one-axis": (PACKED, np.full(4, 255, np.uint8)),
    "packed-lines": (PACKED, np.full((3, 8), 255, np.uint8)),
    "packed-narrow": (PACKED, np.full((4, 7), 255, np.uint8)),
    "packed-later-node": (PACKED, np.full((4, 8), 255, np.uint8)),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_bad_mask(name):
    """S-14: wrong memory for the spelling, or a matrix that is no tree."""
    _refused("mask", validate_batch, *_tree(*BAD_MASKS[name]))


def test_a_packed_line_one_bit_short():
    """S-14: 7 bytes have no bit for draft 57."""
    with pytest.raises(InvalidArgument, match="W = 7"):
        validate_batch(*_tree(PACKED, np.full((4, 7), 255, np.uint8), drafts=57))


def test_a_tree_without_a_mask():
    """S-14: the causal mask does not replace a missing mask."""
    problem, batch = _tree(QLEN)
    _refused("mask", validate_batch, problem, replace(batch, mask=None))


def test_a_tree_past_its_capacity():
    """S-14: 3 drafts where 2 were promised."""
    _refused("max_draft_tokens", validate_batch, *_tree(QLEN, drafts=2))
