from dataclasses import replace
from functools import partial

import pytest
import torch
from mla_step import P, R, build, config
from torch.utils._python_dispatch import TorchDispatchMode

from paged_mla_optimized import Bucket, DraftSteps, ExtendWindow, PagedMla, StepInputs
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument, Unsupported

METADATA = {
    "cu_seqlens_q": torch.tensor([0, 3, 4]).int(),
    "seq_lens": torch.tensor([20, 1]).int(),
    "block_table": torch.zeros(2, 4).int(),
}
QUERIES = {"q_nope": ((64, 4, R), torch.float32), "q_pe": ((64, 4, P), torch.float32)}


def attend(mla, view, cache):
    mla.plan(view.step)
    out, lse = mla.attend(view.tokens["q_nope"], view.tokens["q_pe"], cache)
    return out.clone(), lse.clone()


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["parts", "fixed"])
@pytest.mark.parametrize("bucket", [Bucket(4, 2), Bucket(9, 5), Bucket(64, 8)], ids=str)
def test_any_bucket_has_the_bits_of_the_step_alone(bucket, batch_invariant):
    """S-17: padding of rows and tokens overwrites the values of an earlier step."""
    step = build((200, 3), (33, 1), batch_invariant=batch_invariant)
    mla = PagedMla(step.config, "cpu")
    expected = step.attend(mla)
    inputs = StepInputs(step.config, "cpu", QUERIES)
    inputs.poison()
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    loaded = MlaStep(*lengths, num_tokens=len(step.q_nope))
    inputs.load(loaded, {"q_nope": step.q_nope, "q_pe": step.q_pe})
    out, lse = attend(mla, inputs.view(bucket), step.cache)
    assert torch.equal(out[:4], expected[0])
    assert torch.equal(lse[:4], expected[1])
    assert not out[4:].any()
    assert (lse[4:] == -torch.inf).all()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("tokens", (4.0, 2)),
        ("tokens", (-1, 2)),
        ("rows", (4, "2")),
        ("rows", (4, -1)),
        ("max_query_len", (4, 2, 1.5)),
        ("max_query_len", (4, 2, 0)),
    ],
)
def test_buckets_of_no_step(name, given):
    """S-17: named when made."""
    with pytest.raises(InvalidArgument, match=name):
        Bucket(*given)


@pytest.mark.parametrize("fill", [0, 1])
def test_an_idle_step_reads_and_writes_nothing(fill):
    """S-6, S-10: a cleared step returns (0, -inf) and does not write the cache, for any fill."""
    inputs = StepInputs(config(), "cpu", QUERIES, pad_seq_len=fill)
    inputs.poison()
    inputs.clear()
    mla = PagedMla(config(), "cpu")
    cache = torch.full((3, 16, R + P), torch.nan)
    out, lse = attend(mla, inputs.view(Bucket(8, 8)), cache)
    mla.append(torch.ones(8, R), torch.ones(8, P), cache)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert cache.isnan().all()


def append_step(bucket, tensors, starts, lens, table, slots, value):
    """Load one step; plan and append it as ``GraphedStep`` does, in a bucket of 4 tokens."""
    inputs, mla, cache = tensors
    count = len(slots)
    lengths = (torch.tensor(numbers).int() for numbers in (starts, lens, table))
    latents = {"ckv": torch.full((count, R), value), "k_pe": torch.full((count, P), value)}
    step = MlaStep(*lengths, num_tokens=count)
    inputs.load(step, latents | {"slots": torch.tensor(slots)})
    append_to_slots(mla, inputs.view(bucket), cache)


def append_to_slots(mla, view, cache):
    mla.plan(
        MlaStep(view.cu_seqlens_q, view.seq_lens, view.block_table, num_tokens=view.bucket.tokens)
    )
    mla.append(view.tokens["ckv"], view.tokens["k_pe"], cache, view.tokens["slots"])


def slots_and_latents(*padding):
    return {
        "slots": ((64,), torch.int64, *padding),
        "ckv": ((64, R), torch.float32),
        "k_pe": ((64, P), torch.float32),
    }


@pytest.mark.parametrize("padding", [(), (None,), (-1,)], ids=["none", "None", "stated"])
def test_an_idle_step_writes_to_no_named_slot(padding):
    """S-6, S-10: 0 is a slot as any other; -1 is nowhere. A graph warms up with such a step."""
    inputs = StepInputs(config(), "cpu", slots_and_latents(*padding))
    mla, cache = PagedMla(config(), "cpu"), torch.full((3, 16, R + P), 7.0)
    for spoil in (lambda: None, inputs.poison):
        spoil()
        inputs.clear()
        append_to_slots(mla, inputs.view(Bucket(4, 2)), cache)
        assert (cache == 7).all()


def test_named_slots_of_an_earlier_step_are_written_to_no_more():
    """S-6, S-10: after a shorter step there is -1, not the slots of the longer step before it."""
    inputs = StepInputs(config(), "cpu", slots_and_latents())
    tensors = inputs, PagedMla(config(), "cpu"), torch.zeros(3, 16, R + P)
    cache = tensors[2]
    append_step(Bucket(4, 2), tensors, [0, 4], [4], [[1]], [16, 17, 18, 19], 1.0)
    assert (cache[1, :4] == 1).all()
    cache[1] = 7  # another request has this block now
    append_step(Bucket(4, 2), tensors, [0, 1], [1], [[2]], [32], 2.0)
    assert (cache[1] == 7).all()
    assert (cache[2, 0] == 2).all()
    assert not cache[2, 1:].any()


def test_the_tail_of_every_named_tensor_is_its_padding():
    """S-6: up to the capacity, so in every bucket; an embedding looks at padded ids too."""
    declared = {
        "slots": ((64,), torch.int64),
        "rows": ((64,), torch.int32),
        "ids": ((64,), torch.int64, 0),
        "segments": ((64, 2), torch.int32, 5),
        "hidden": ((64, 3), torch.float16),
        "codes": ((64, 4), torch.uint8),
        "flags": ((64,), torch.bool),
        "bias": ((64,), torch.float32, -torch.inf),
    }
    padding = {"slots": -1, "rows": -1, "ids": 0, "segments": 5, "hidden": 0, "codes": 0}
    padding |= {"flags": False, "bias": -torch.inf}
    inputs = StepInputs(config(), "cpu", declared)

    def assert_padded(first):
        for name, tensor in inputs.tokens.items():
            assert (tensor[first:] == padding[name]).all(), name
            assert (tensor[:first] == 1).all(), name

    assert_padded(0)
    for count in (64, 9, 30, 0, 1):
        inputs.poison()
        ones = {name: torch.ones_like(tensor[:count]) for name, tensor in inputs.tokens.items()}
        inputs.load(MlaStep(**METADATA, num_tokens=count), ones)
        assert_padded(count)
    inputs.poison()
    inputs.clear()
    assert_padded(0)


@pytest.mark.parametrize(
    ("dtype", "padding"),
    [
        (torch.int64, 0.5),
        (torch.int64, True),
        (torch.int64, 2**63),
        (torch.int32, -(2**31) - 1),
        (torch.uint8, -1),
        (torch.bool, 2),
        (torch.float16, 1e6),
        (torch.float32, "0"),
        (torch.float32, True),
    ],
    ids=str,
)
def test_padding_that_the_dtype_does_not_hold(dtype, padding):
    """S-17: named when the inputs are made."""
    with pytest.raises(InvalidArgument, match="extra: got padding") as error:
        StepInputs(config(), "cpu", {"extra": ((64,), dtype, padding)})
    assert str(dtype) in str(error.value)


@pytest.mark.parametrize(
    "declared",
    [
        ((64,),),
        torch.int64,
        ((64,), torch.int64, 0, 0),
        ((64,), 0),
        ((64, "8"), torch.int64),
        ((64, -8), torch.int64),
    ],
)
def test_a_declaration_of_another_form(declared):
    """S-17: a shape, a dtype, and a padding if its default is not wanted."""
    with pytest.raises(InvalidArgument, match="extra"):
        StepInputs(config(), "cpu", {"extra": declared})


@pytest.mark.parametrize("name", ["pad_seq_len", "table_width"])
@pytest.mark.parametrize("value", [-1, 2])
def test_padding_that_is_not_legal(name, value):
    """S-2: a padded row has no key or one, and a table a column for it."""
    if (name, value) == ("table_width", 2):
        value = 0
    with pytest.raises(InvalidArgument, match=name):
        StepInputs(config(), "cpu", {}, **{name: value})


def test_a_tensor_that_is_not_given_stays_as_it_is():
    """S-17: an engine may write queries in place, and load them from there."""
    inputs = StepInputs(config(), "cpu", QUERIES)
    inputs.tokens["q_pe"].fill_(7)
    inputs.load(MlaStep(**METADATA, num_tokens=4), {"q_nope": torch.ones(4, 4, R)})
    assert (inputs.tokens["q_pe"] == 7).all()


def test_a_step_with_no_token_at_all():
    """S-6: T = 0 is a step too."""
    mla = PagedMla(config(), "cpu")
    out, lse = attend(
        mla, StepInputs(config(), "cpu", QUERIES).view(Bucket(0, 0)), torch.zeros(1, 16, R + P)
    )
    assert out.shape == (0, 4, R)
    assert lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("spelling", "shape"),
    [("tree:qlen", (64 * 5,)), ("tree:full", (64 * 256,)), ("tree:packed", (64, 1))],
)
def test_room_for_masks(spelling, shape):
    """S-14: a mask buffer holds the draft part only, unless an engine insists on FULL."""
    inputs = StepInputs(config(mask=spelling, max_draft_tokens=5), "cpu", {})
    assert inputs.mask.shape == shape


def test_packed_lines_may_be_wider_than_their_nodes():
    """S-14: engines count a line in words; bits past the longest draft are unused."""
    inputs = StepInputs(config(mask="tree:packed", max_draft_tokens=5), "cpu", {})
    lines = torch.arange(1, 9, dtype=torch.uint8).repeat_interleave(4).view(8, 4)
    starts, lengths = torch.tensor([0, 3, 8]).int(), torch.tensor([9, 8]).int()
    inputs.load(MlaStep(starts, lengths, torch.zeros(2, 2).int(), num_tokens=8, mask=lines))
    assert inputs.mask[:8, 0].tolist() == list(range(1, 9))


def test_what_does_not_fit_is_an_error():
    """S-17: a bucket past the capacities, and a tensor of another length."""
    inputs = StepInputs(config(), "cpu", QUERIES)
    with pytest.raises(InvalidArgument, match="rows"):
        inputs.view(Bucket(9, 9))
    with pytest.raises(InvalidArgument, match="tokens"):
        inputs.view(Bucket(65, 8))
    with pytest.raises(InvalidArgument, match="hidden"):
        StepInputs(config(), "cpu", {"hidden": ((63, 2), torch.float32)})
    with pytest.raises(InvalidArgument, match="hidden"):
        StepInputs(config(), "cpu", {"hidden": ((), torch.float32)})


TOKENS = {"q_nope": torch.ones(4, 4, R)}
NAMES = ("cu_seqlens_q", "seq_lens", "block_table", "mask")
NINE_ROWS = {
    "cu_seqlens_q": torch.arange(10).int(),
    "seq_lens": torch.ones(9).int(),
    "block_table": torch.zeros(9, 4).int(),
}


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("cu_seqlens_q", {"seq_lens": torch.ones(1).int()}),
        ("seq_lens", {"seq_lens": torch.tensor([20.0, 1.0])}),
        ("seq_lens", NINE_ROWS),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0]).int()}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0, 3, 4])}),
        ("block_table", {"block_table": torch.zeros(1, 4).int()}),
        ("block_table", {"block_table": torch.zeros(2, 17).int()}),
        ("block_table", {"block_table": torch.zeros(2).int()}),
        ("q_nope", {"q_nope": torch.ones(65, 4, R)}),
        ("q_nope", {"q_nope": torch.ones(4, 1, R)}),
        ("q_nope", {"q_nope": torch.ones(4, 4, R).double()}),
        ("q_pe", {"q_pe": torch.ones(3, 4, P)}),
        ("q_nope", {"q_nope": None}),
        ("seq_lens", {"seq_lens": None}),
        ("hidden", {"hidden": torch.ones(4, 4)}),
        ("mask", {"mask": torch.ones(9, dtype=torch.bool)}),
    ],
    ids=[
        "one-for-all", "floats", "rows", "one-start", "int64", "one-table", "width", "1d", "tokens",
        "heads", "double", "fewer-tokens", "none", "no-lengths", "unknown", "no-tree",
    ],
)  # fmt: skip
def test_a_step_that_does_not_fit_is_refused(argument, changes):
    """S-17: shapes, dtypes and capacities are looked at before a byte is copied."""
    inputs = StepInputs(config(), "cpu", QUERIES)
    inputs.poison()
    before = [tensor.clone() for tensor in inputs.tensors]
    step = METADATA | {n: t for n, t in changes.items() if n in NAMES}
    tokens = TOKENS | {n: t for n, t in changes.items() if n not in NAMES}
    with pytest.raises(InvalidArgument) as error:
        inputs.load(MlaStep(**step, num_tokens=4), tokens)
    assert error.value.argument == argument
    for tensor, old in zip(inputs.tensors, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("spelling", "mask"),
    [
        ("tree:qlen", torch.ones(64 * 9 + 1, dtype=torch.bool)),
        ("tree:qlen", torch.ones(4, 9, dtype=torch.bool)),
        ("tree:qlen", torch.ones(9)),
        ("tree:packed", torch.ones(65, 2, dtype=torch.uint8)),
        ("tree:packed", torch.ones(4, 1, dtype=torch.uint8)),
        ("tree:packed", torch.ones(3, 2, dtype=torch.uint8)),
    ],
    ids=["elements", "2d", "floats", "lines", "narrow", "fewer-lines-than-tokens"],
)
def test_a_mask_that_does_not_fit_is_refused(spelling, mask):
    """S-14: more masks than the largest step has, lines too narrow for a draft, or too few."""
    inputs = StepInputs(config(mask=spelling, max_draft_tokens=9), "cpu", QUERIES)
    with pytest.raises(InvalidArgument, match="mask"):
        inputs.load(MlaStep(**METADATA, num_tokens=4, mask=mask), TOKENS)


@pytest.mark.parametrize("spelling", ["tree:qlen", "tree:full", "tree:packed"])
def test_a_tree_has_a_mask_in_every_step(spelling):
    """S-14: the mask of the step before is not this one's."""
    inputs = StepInputs(config(mask=spelling, max_draft_tokens=9), "cpu", QUERIES)
    with pytest.raises(InvalidArgument, match="mask"):
        inputs.load(MlaStep(**METADATA, num_tokens=4), TOKENS)


class HostCopies(TorchDispatchMode):
    """Takes notes of copies from the host: whether they wait, as they do for strided tensors."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten.copy_.default:
            self.note(args[1], at_once=args[2] if len(args) > 2 else False)
        elif function is torch.ops.aten._to_copy.default:
            self.note(args[0], at_once=kwargs.get("non_blocking", False))
        return function(*args, **kwargs)

    def note(self, source, *, at_once):
        if source.device.type == "cpu":
            self.waits.append(not (at_once and source.is_contiguous()))


@pytest.mark.parametrize(
    ("spelling", "mask"),
    [
        ("tree:qlen", torch.ones(10, dtype=torch.bool)),
        ("tree:packed", torch.ones(4, 8, dtype=torch.uint8)),
    ],
)
def test_loading_never_waits(spelling, mask):
    """S-17: dense tensors cross from the host as they are and asynchronously, padding never."""
    tree = config(mask=spelling, max_draft_tokens=3)
    inputs = StepInputs(tree, "meta", {"q_nope": QUERIES["q_nope"]})
    with HostCopies() as copies:
        inputs.load(MlaStep(**METADATA, num_tokens=4, mask=mask), TOKENS)
    assert copies.waits == [False] * 5


def test_loading_leaves_no_gradient_behind():
    """S-17: inputs that remembered where a step came from would hold every step's memory."""
    inputs = StepInputs(config(), "cpu", QUERIES)
    inputs.load(
        MlaStep(**METADATA, num_tokens=4), {"q_nope": torch.ones(4, 4, R, requires_grad=True)}
    )
    assert not [tensor for tensor in inputs.tensors if tensor.requires_grad]


def draft_steps(device):
    sizes = {"max_requests": 1, "branches": 1, "steps": 1, "prefix_width": 1, "own_width": 1}
    return DraftSteps(**sizes, block_size=4, device=device)


@pytest.mark.parametrize("device", [0.5, ["cpu"]])
def test_what_is_no_device(device):
    """All classes that take a device raise the same error."""
    for make in (partial(StepInputs, config(), tokens={}), partial(PagedMla, config())):
        with pytest.raises(InvalidArgument, match=r"device: got .*; allowed: a torch.device"):
            make(device=device)


@pytest.mark.parametrize(
    "make",
    [partial(StepInputs, config(), tokens={}), partial(ExtendWindow, 1, 1), draft_steps],
    ids=["inputs", "window", "drafts"],
)
@pytest.mark.parametrize("device", ["cuda:99", "nowhere"])
def test_a_device_that_is_not_there(make, device):
    """The error is that of instances."""
    with pytest.raises(Unsupported, match=f"^device {device} is not available: "):
        make(device=device)


@pytest.mark.parametrize("value", [None, 0.0, 2**31])
def test_the_block_of_padded_rows_is_an_entry_of_a_table(value):
    """S-17: an int32."""
    with pytest.raises(InvalidArgument, match="pad_block"):
        StepInputs(config(), "cpu", {}, pad_block=value)


@pytest.mark.parametrize("given", [None, torch.zeros(3), [], "ids", 5], ids=str)
def test_tensors_of_tokens_have_names(given):
    """S-17: a tensor alone is none of a step; without any, `load` takes None."""
    with pytest.raises(InvalidArgument, match=r"tokens: got .*; allowed: a Mapping"):
        StepInputs(config(), "cpu", given)
    inputs, step = StepInputs(config(), "cpu", {}), build((20, 3)).described
    inputs.load(step)
    if given is None:
        return
    with pytest.raises(InvalidArgument, match=r"tokens: got .*; allowed: a Mapping"):
        inputs.load(step, given)


@pytest.mark.parametrize("name", ["mask", "seq_lens"])
def test_a_tensor_of_tokens_has_a_name_of_its_own(name):
    """S-17: `load` would take it for what every step has."""
    with pytest.raises(InvalidArgument, match=f"tokens: got {name}"):
        StepInputs(config(), "cpu", {name: ((config().max_query_tokens,), torch.int32)})


def test_a_bucket_is_one():
    """S-17: a pair is not a bucket."""
    with pytest.raises(InvalidArgument, match="bucket"):
        StepInputs(config(), "cpu", {}).view((4, 2))


@pytest.mark.parametrize("value", [2, 1.0, True, "0"])
def test_the_length_of_padded_rows_is_an_integer(value):
    """S-17: 0 or 1."""
    with pytest.raises(InvalidArgument, match="pad_seq_len"):
        StepInputs(config(), "cpu", {}, pad_seq_len=value)


@pytest.mark.parametrize("is_told", [False, True])
def test_rows_that_the_table_of_a_step_is_too_narrow_for(is_told):
    """S-1: padding, as in a plan; the inputs still have the columns of the step before."""
    inputs, mla = StepInputs(config(), "cpu", {}), PagedMla(config(), "cpu")
    size = config().block_size
    keys = [3 * size, size]
    wide = MlaStep.from_host([1, 1], keys, [[0, 1, 5], [2]], device="cpu")
    narrow = MlaStep.from_host([1, 1], keys, [[3, 4], [6]], device="cpu")
    narrow = narrow if is_told else replace(narrow, query_lens=None, max_seq_lens=None)
    inputs.load(wide)
    inputs.load(narrow)
    mla.plan(inputs.view(Bucket(2, 2)).step)
    assert mla.slot_mapping.tolist() == [-1, 6 * size + size - 1]
