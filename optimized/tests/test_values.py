import pytest
import torch
from mla_step import build

from paged_mla_optimized import PagedMla, RequestMap
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

I32 = torch.int32
GOOD = {
    "cu_seqlens_q": [0, 3, 4],
    "seq_lens": [20, 33],
    "block_table": [[0, 1, -9], [4, 3, 2]],
    "num_blocks": 5,
    "num_tokens": 4,
}
BAD = [
    ("cu_seqlens_q", "not-from-0", {"cu_seqlens_q": [1, 3, 4]}),
    ("cu_seqlens_q", "decreasing", {"cu_seqlens_q": [0, 5, 4]}),
    ("cu_seqlens_q", "wrapping", {"cu_seqlens_q": [0, 2**31 - 1, -2]}),
    ("cu_seqlens_q", "past-tokens", {"cu_seqlens_q": [0, 3, 5]}),
    ("seq_lens", "negative", {"seq_lens": [-1, 33]}),
    ("seq_lens", "past-capacity", {"seq_lens": [20, 257]}),
    ("seq_lens", "most", {"seq_lens": [20, 2**31 - 1]}),
    ("seq_lens", "below-query", {"seq_lens": [2, 33]}),
    ("block_table", "narrow", {"block_table": [[0, 1], [4, 3]]}),
    ("block_table", "of-width-0", {"block_table": [[], []]}),
    ("block_table", "negative", {"block_table": [[0, -1, -9], [4, 3, 2]]}),
    ("block_table", "past-cache", {"block_table": [[0, 1, -9], [4, 5, 2]]}),
    (
        "block_table",
        "written-twice",
        {"block_table": [[0, 2, -9], [4, 3, 2]], "seq_lens": [17, 33]},
    ),
    ("num_blocks", "none", {"num_blocks": 0}),
    ("slot_mapping", "below", {"slot_mapping": [0, -2, 1, 2]}),
    ("slot_mapping", "past-cache", {"slot_mapping": [0, 1, 2, 80]}),
    ("slot_mapping", "twice", {"slot_mapping": [7, -1, -1, 7]}),
]


def check(changes, tree_mask=None, **config_changes):
    values = GOOD | changes
    slots = values.get("slot_mapping")
    mla = PagedMla(build(**config_changes).config, "cpu")
    mla.check(
        MlaStep(
            torch.tensor(values["cu_seqlens_q"], dtype=I32),
            torch.tensor(values["seq_lens"], dtype=I32),
            torch.tensor(values["block_table"], dtype=I32),
            num_tokens=values["num_tokens"],
            mask=tree_mask,
        ),
        num_blocks=values["num_blocks"],
        slot_mapping=None if slots is None else torch.tensor(slots),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_tokens": 9},
        {"seq_lens": [0, 33]},
        {"slot_mapping": [79, 0, -1, 5]},
        {"block_table": [[0, 1, 99], [0, 1, 2]], "seq_lens": [17, 33], "cu_seqlens_q": [0, 0, 1]},
    ],
    ids=["plain", "padded-tokens", "padded-row", "slots", "shared-prefix"],
)
def test_legal_steps_pass(changes):
    """S-2, S-9: padding, shared blocks and any table tail are legal."""
    check(changes)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [(argument, changes) for argument, _, changes in BAD],
    ids=[f"{argument}-{name}" for argument, name, _ in BAD],
)
def test_values_no_rule_allows(argument, changes):
    """S-1, S-2, S-10: the error names the argument."""
    with pytest.raises(InvalidArgument) as error:
        check(changes)
    assert error.value.argument == argument


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ("seq_lens: got 257 in row 1; allowed: 0 to max_model_len = 256", {"seq_lens": [20, 257]}),
        ("seq_lens: got 2 in row 0, whose query_len is 3; allowed: 0, or", {"seq_lens": [2, 33]}),
        (
            "block_table: got 2 columns; allowed: at least 3, for the 33 tokens of row 1",
            {"block_table": [[0, 1], [4, 3]]},
        ),
        (
            "block_table: got block 5 in row 1, column 1; allowed: 0 to 4",
            {"block_table": [[0, 1, -9], [4, 5, 2]]},
        ),
        (
            "slot_mapping: got slot 80 of token 3; allowed: -1 to 79",
            {"slot_mapping": [0, 1, 2, 80]},
        ),
    ],
    ids=["length", "short", "narrow", "block", "slot"],
)
def test_the_row_or_the_token_is_named(given, changes):
    """S-1, S-2, S-10: the first one, what it has, and what is allowed."""
    with pytest.raises(InvalidArgument, match=given):
        check(changes)


def test_more_queries_than_keys_without_a_causal_mask():
    """S-2, S-10: legal, and its only key is written once; the message of others names the row."""
    short = {"cu_seqlens_q": [0, 1, 4], "seq_lens": [20, 1], "block_table": [[0, 1], [4, 3]]}
    check(short, mask="non_causal")
    with pytest.raises(InvalidArgument, match="seq_lens: got 1 in row 1, whose query_len is 3"):
        check(short)
    shared = short | {"seq_lens": [17, 1], "block_table": [[0, 4], [4, 3]]}
    with pytest.raises(InvalidArgument, match="two tokens for slot 64"):
        check(shared, mask="non_causal")


@pytest.mark.parametrize(
    "changes",
    [{"slot_mapping": [7, -1, 9, 7]}, {"block_table": [[7, 7, 0], [7, 0, 0]], "seq_lens": [1, 1]}],
    ids=["given", "planned"],
)
def test_a_reserved_slot_may_come_more_than_once(changes):
    """S-10: nothing is stored there, so no two tokens are."""
    changes |= {"cu_seqlens_q": [0, 1, 2], "num_blocks": 8}
    check(changes, reserved_slot=7 if "slot_mapping" in changes else 7 * 16)
    with pytest.raises(InvalidArgument):
        check(changes)


SHARED = {"block_table": [[0, 1, -9], [4, 0, 2]]}  # row 1 reads what row 0 has in columns 0


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ("block_table: got block 1 in rows 0 and 1", {"block_table": [[0, 1, -9], [4, 1, 2]]}),
        ("block_table: got block 2 in rows 0 and 1", {"block_table": [[2, 1, -9], [4, 3, 2]]}),
        ("block_table: got block 4 twice in row 1", {"block_table": [[0, 1, -9], [4, 3, 4]]}),
        ("block_table: got block 0 twice in row 0", {"block_table": [[0, 0, -9], [4, 3, 2]]}),
        (
            "slot_mapping: got block 0 in rows 0 and 1, and this step writes to it",
            SHARED | {"slot_mapping": [-1, -1, 15, -1]},
        ),
        (
            "slot_mapping: got block 0 in rows 0 and 1",  # by a padded token
            SHARED | {"slot_mapping": [-1, -1, -1, -1, 0], "num_tokens": 5},
        ),
    ],
    ids=["read-last", "written-last", "new", "context", "named", "padded"],
)
def test_blocks_that_are_not_a_rows_own(given, changes):
    """S-1, S-13: no block twice in a row, and no write to a block that two rows read."""
    with pytest.raises(InvalidArgument, match=given):
        check(changes)


@pytest.mark.parametrize(
    "changes",
    [
        SHARED,
        SHARED | {"slot_mapping": [16, 17, 18, 33]},
        SHARED | {"slot_mapping": [64, -1, -1, 79]},
        {"block_table": [[0, 1, 0], [4, 3, 2]]},
        {"block_table": [[1, 2, -9], [4, 3, 2]], "cu_seqlens_q": [0, 0, 1]},
        {"block_table": [[0, 4, -9], [4, 3, 2]], "seq_lens": [16, 33]},
        {"block_table": [[0, 1, -9], [4, 3, 0]], "seq_lens": [20, 0]},
    ],
    ids=["prefix", "named", "of-another-row", "tail", "no-queries", "past-the-row", "padded-row"],
)
def test_blocks_that_rows_may_have_together(changes):
    """S-9, S-13: full prefixes, blocks that no row reads, and blocks of rows without queries."""
    check(changes)


@pytest.mark.parametrize("order", [[12, 8], [16, 20]], ids=["one-group", "two-groups"])
def test_two_rows_of_one_request(order):
    """S-13, S-18: queries of one request may be rows, where slots are named, in any order.

    Planned runs of a group know nothing of each other (S-11).
    """
    config = {"cache_format": "fp8_block_group", "block_size": 64}
    step = {
        "cu_seqlens_q": [0, 4, 8], "seq_lens": order, "block_table": [[1], [1]], "num_tokens": 8
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="block 1 in rows 0 and 1"):
        check(step, **config)
    check(step | {"slot_mapping": [*range(72, 76), *range(68, 72)]}, **config)


def test_rows_of_the_reserved_slot_are_padding():
    """S-10: all blocks of an idle rank's rows are its block, for any length."""
    step = {"block_table": [[0, 0, -9], [0, 0, 0]]}
    check(step, reserved_slot=0)
    check(step | {"block_table": [[0, 0, -9], [1, 2, 3]]}, reserved_slot=5)
    for wrong in ([[0, 1, -9], [1, 2, 3]], [[4, 4, -9], [1, 2, 3]]):
        with pytest.raises(InvalidArgument, match="block_table"):
            check(step | {"block_table": wrong}, reserved_slot=0)
    with pytest.raises(InvalidArgument, match="rows 0 and 1"):  # it ends in front of the slot
        check({"block_table": [[0], [0]], "seq_lens": [4, 1]}, reserved_slot=5)


def check_map(req_to_token, request_ids, max_query_len=None, reserved_slot=None, **changes):
    values = GOOD | changes
    PagedMla(build(table_multiple=2, reserved_slot=reserved_slot).config, "cpu").check(
        MlaStep(
            torch.tensor(values["cu_seqlens_q"], dtype=I32),
            torch.tensor(values["seq_lens"], dtype=I32),
            RequestMap(req_to_token, torch.tensor(request_ids)),
            num_tokens=values["num_tokens"],
            max_query_len=max_query_len,
        ),
        num_blocks=values["num_blocks"],
    )


def slots_of_requests():
    """Return the map of the legal step: requests 2 and 0, in blocks 0, 1 and 4, 3, 2."""
    slots = torch.full((3, 48), -7, dtype=I32)
    for request, blocks in ((2, (0, 1)), (0, (4, 3, 2))):
        for column, block in enumerate(blocks):
            slots[request, 16 * column : 16 * column + 16] = 16 * block + torch.arange(16)
    return slots


def test_a_map_of_requests():
    """S-1: what plan takes, check takes; lines of padded rows are not read."""
    check_map(slots_of_requests(), [2, 0], max_query_len=3)
    check_map(slots_of_requests(), [99, 0], seq_lens=[0, 33])


@pytest.mark.parametrize(
    ("argument", "name", "changes"),
    [
        ("request_ids", "unknown", {"request_ids": [2, 3]}),
        ("req_to_token", "short", {"seq_lens": [20, 49]}),
        ("req_to_token", "scattered", {"at": (2, 5)}),
        ("req_to_token", "inside-a-block", {"shift": 1}),
        ("block_table", "past-cache", {"num_blocks": 4}),
        ("block_table", "one-request-twice", {"request_ids": [0, 0]}),
        ("max_query_len", "zero", {"max_query_len": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_maps_no_rule_allows(argument, name, changes):  # noqa: ARG001 - the name is the test's id
    """S-1: the error names what of the map is wrong."""
    slots = slots_of_requests() + changes.pop("shift", 0)
    if place := changes.pop("at", None):
        slots[place] += 1
    with pytest.raises(InvalidArgument) as error:
        check_map(slots, changes.pop("request_ids", [2, 0]), **changes)
    assert error.value.argument == argument


def test_padding_of_a_map():
    """S-10: lines of the reserved slot alone, as engines keep one for rows that they make up."""
    step = {"cu_seqlens_q": [0, 20, 22], "seq_lens": [40, 40], "num_tokens": 22, "num_blocks": 5}
    slots = torch.zeros((1, 48), dtype=I32)
    check_map(slots, [0, 0], reserved_slot=0, **step)
    with pytest.raises(InvalidArgument, match="req_to_token"):
        check_map(slots, [0, 0], **step)


def tree(**at):
    """Return the QLEN masks of drafts 3 and 1, a chain, with some elements changed."""
    mask = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    for index, value in at.items():
        mask[int(index[1:])] = value
    return mask


@pytest.mark.parametrize(
    "mask", [tree(_4=False), tree(_1=True), tree()[:-1]], ids=["blind", "later", "short"]
)
def test_masks_that_are_no_tree(mask):
    """S-14: a node sees itself and no later node."""
    with pytest.raises(InvalidArgument) as error:
        check({}, mask, mask="tree:qlen", max_draft_tokens=3)
    assert error.value.argument == "mask"


def test_a_tree_passes():
    """S-14: the unspoilt mask is legal, in a buffer for larger steps too."""
    check({}, tree(), mask="tree:qlen", max_draft_tokens=3)
    check({}, torch.cat([tree(), tree(_4=False)]), mask="tree:qlen", max_draft_tokens=3)


def test_hidden_context():
    """S-14: the FULL spelling's context columns are true."""
    mask = torch.ones(3 * 20 + 33, dtype=torch.bool)
    mask[[18, 19, 39]] = False  # later drafts of the first row
    check({}, mask, mask="tree:full", max_draft_tokens=3)
    mask[4] = False
    with pytest.raises(InvalidArgument) as error:
        check({}, mask, mask="tree:full", max_draft_tokens=3)
    assert error.value.argument == "mask"


def test_more_drafts_than_announced():
    """S-14: a row longer than max_draft_tokens does not fit the packed words."""
    message = "cu_seqlens_q: got 3 drafts in row 0; allowed: at most max_draft_tokens = 2"
    with pytest.raises(InvalidArgument, match=f"^{message}$"):
        check({}, tree(), mask="tree:qlen", max_draft_tokens=2)
