import pytest
import torch
from mla_step import build

from paged_mla_optimized import PagedMla
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
    ("cu_seqlens_q", "past-tokens", {"cu_seqlens_q": [0, 3, 5]}),
    ("seq_lens", "negative", {"seq_lens": [-1, 33]}),
    ("seq_lens", "past-capacity", {"seq_lens": [20, 257]}),
    ("seq_lens", "below-query", {"seq_lens": [2, 33]}),
    ("block_table", "narrow", {"block_table": [[0, 1], [4, 3]]}),
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
        torch.tensor(values["cu_seqlens_q"], dtype=I32),
        torch.tensor(values["seq_lens"], dtype=I32),
        torch.tensor(values["block_table"], dtype=I32),
        num_blocks=values["num_blocks"],
        num_tokens=values["num_tokens"],
        mask=tree_mask,
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
    """S-14: the unspoilt mask is legal."""
    check({}, tree(), mask="tree:qlen", max_draft_tokens=3)


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
    with pytest.raises(InvalidArgument) as error:
        check({}, tree(), mask="tree:qlen", max_draft_tokens=2)
    assert error.value.argument == "max_draft_tokens"
