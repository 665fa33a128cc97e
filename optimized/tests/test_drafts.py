import numpy as np
import pytest
import torch
from mla_step import P, R, assert_close, build, config, dense

from paged_mla_optimized import DraftSteps, ExtendWindow, LatentCache, PagedMla
from paged_mla_optimized.serving import drafts as drafts_module
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

I32 = torch.int32


def draft_steps(**changes):
    shape = {
        "max_requests": 3, "branches": 2, "steps": 3, "prefix_width": 3, "own_width": 2,
        "block_size": 4,
    }  # fmt: skip
    return DraftSteps(**(shape | changes), device="cpu")


@pytest.mark.parametrize("name", ["max_requests", "branches", "steps", "block_size"])
def test_drafts_of_nothing(name):
    """S-15: every size is an integer, at least 1."""
    for size in (0, 1.0, True):
        with pytest.raises(InvalidArgument, match=name):
            draft_steps(**{name: size})


def test_windows_of_more_tokens_than_a_step_has():
    """S-16: the windows of all rows are one step."""
    assert ExtendWindow(2, 2**22, "meta").window == 2**22
    with pytest.raises(InvalidArgument, match=r"^window: got 4194305; allowed: 1 to 4194304"):
        ExtendWindow(2, 2**22 + 1, "meta")


class Kernel:
    """Takes a kernel's place; notes what it is launched with."""

    arg_names = ()

    def __init__(self):
        self.taken = []

    def __getitem__(self, grid):
        return lambda *arguments, **_constants: self.taken.extend([*grid, *arguments])


def test_integers_of_numpy_are_as_good(monkeypatch):
    """S-15: launches take Python's alone."""
    kernel, sizes = Kernel(), {"max_requests": 3, "branches": 2, "steps": 3, "prefix_width": 3}
    for name in ("draft_rows_kernel", "copy_tails_kernel"):
        monkeypatch.setattr(drafts_module, name, kernel)
    sizes |= {"own_width": 2, "block_size": 4}
    drafts = draft_steps(**{name: np.int64(size) for name, size in sizes.items()})
    step = (PREFIX_LENS, PREFIX_TABLE, BRANCH_BLOCKS)
    drafts.fill(*step)
    drafts.copy_tails(torch.zeros(32, 4, 6), *step)
    assert {type(x) for x in kernel.taken} == {torch.Tensor, int}


@pytest.mark.parametrize(("name", "rows", "window"), [("max_rows", 0, 3), ("window", 2, -3)])
def test_a_window_of_nothing(name, rows, window):
    """S-16: every size is at least 1."""
    with pytest.raises(InvalidArgument, match=name):
        ExtendWindow(rows, window, "cpu")


PREFIX_LENS = torch.tensor([6, 0, 8], dtype=I32)
PREFIX_TABLE = torch.tensor([[7, 2, -1], [9, 9, 9], [5, 0, 2**31 - 1]], dtype=I32)
BRANCH_BLOCKS = torch.arange(20, 32, dtype=I32).view(3, 2, 2)


def test_hand_computed_views():
    """S-15: full prefix blocks shared, then own blocks; each step one token longer."""
    drafts = draft_steps()
    drafts.fill(PREFIX_LENS, PREFIX_TABLE, BRANCH_BLOCKS)
    assert drafts.seq_lens.tolist() == [[n, n, 0, 0, m, m] for n, m in ((7, 9), (8, 10), (9, 11))]
    assert drafts.cu_seqlens_q.tolist() == list(range(7))
    table = drafts.block_table.tolist()
    assert [row[:3] for row in table[:2]] == [[7, 20, 21], [7, 22, 23]]
    assert [row[:4] for row in table[4:]] == [[5, 0, 28, 29], [5, 0, 30, 31]]
    assert all(entry == -1 for row in table[2:4] for entry in row)


def test_tails_are_copied():
    """S-15: each branch's first block starts as the prefix's last, and nothing else changes."""
    cache = torch.arange(32 * 4 * 6, dtype=torch.float32).view(32, 4, 6)
    before = cache.clone()
    draft_steps().copy_tails(cache, PREFIX_LENS, PREFIX_TABLE, BRANCH_BLOCKS)
    for block in (20, 22):
        assert torch.equal(cache[block, :2], before[2, :2])
        before[block, :2] = before[2, :2]
    assert torch.equal(cache, before)


def test_prefixes_of_nothing_touch_no_cache():
    """S-6: rows are padding for any blocks, so both kernels can compile before requests arrive."""
    cache = torch.full((2, 4, 6), torch.nan)
    before = cache.clone()
    steps, blocks = draft_steps(), torch.full_like(BRANCH_BLOCKS, -1)
    nothing = (torch.zeros_like(PREFIX_LENS), torch.full_like(PREFIX_TABLE, -1), blocks)
    steps.fill(*nothing)
    steps.copy_tails(cache, *nothing)
    assert torch.equal(cache.view(I32), before.view(I32))
    assert not steps.seq_lens.any()


@pytest.mark.parametrize("prefix_len", [15, 16, 17, 3])
def test_branches_never_see_each_other(prefix_len):
    """S-15: three steps of two branches over a shared, partly filled block."""
    prefix = build((prefix_len, 1), seed=3)
    cache = torch.cat([prefix.cache, torch.full((4, 16, R + P), torch.nan)])
    first = len(prefix.cache)
    table = prefix.block_table[:, :2].contiguous()
    blocks = torch.arange(first, first + 4, dtype=I32).view(1, 2, 2)
    lens = torch.tensor([prefix_len], dtype=I32)
    drafts = draft_steps(max_requests=1, prefix_width=2, block_size=16)
    drafts.fill(lens, table, blocks)
    drafts.copy_tails(cache, lens, table, blocks)
    mla = PagedMla(config(), "cpu")
    keys = [prefix.keys[0], prefix.keys[0]]
    generator = torch.Generator().manual_seed(4)
    for step in range(3):
        q = torch.randn(2, 4, R + P, generator=generator)
        new = torch.randn(2, R + P, generator=generator)
        keys = [torch.cat([old, key[None]]) for old, key in zip(keys, new, strict=True)]
        mla.plan(
            MlaStep(drafts.cu_seqlens_q, drafts.seq_lens[step], drafts.block_table, num_tokens=2)
        )
        mla.append(new[:, :R], new[:, R:], cache)
        actual = mla.attend(q[..., :R].contiguous(), q[..., R:].contiguous(), cache)
        alone = build((prefix_len + step + 1, 1), (prefix_len + step + 1, 1))
        alone.keys, alone.q_nope, alone.q_pe = keys, q[..., :R], q[..., R:]
        assert_close(actual, dense(alone))


def test_own_blocks_must_hold_the_drafts():
    """S-15: too few blocks of its own is an error before anything runs."""
    with pytest.raises(InvalidArgument, match="own_width"):
        draft_steps(steps=9)
    with pytest.raises(InvalidArgument, match="prefix_table"):
        draft_steps().fill(PREFIX_LENS, PREFIX_TABLE[:, :2], BRANCH_BLOCKS)


def test_extend_window():
    """S-16: every request runs its whole window; a padded one has no token to see."""
    window = ExtendWindow(4, 3, "cpu")
    window.fill(torch.tensor([5, 0, 1, 70], dtype=I32))
    assert window.seq_lens.tolist() == [8, 0, 4, 73]
    assert window.cu_seqlens_q.tolist() == [0, 3, 6, 9, 12]


def test_a_window_keeps_the_length_that_it_was_made_with():
    """S-16: a number in a tensor may change later."""
    size = torch.tensor(3)
    window = ExtendWindow(2, size, "cpu")
    size.fill_(1)
    window.fill(torch.tensor([5, 0], dtype=I32))
    assert window.seq_lens.tolist() == [8, 0]


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(32, 8, 6),
        torch.zeros(32, 4, 6, 2)[..., 0],
        torch.zeros(32, 24),
        torch.zeros(32, 4, 6, device="meta"),
        None,
        LatentCache("fp32", None),
        LatentCache("fp8_block_token", torch.zeros(32, 4, 6), [1.0]),
        LatentCache("fp8_block_token", torch.zeros(32, 4, 6)),
        LatentCache("fp8_block_group", torch.zeros(32, 4, 6), torch.ones(32, 1, 8)),
        LatentCache("fp32", torch.zeros(32, 4, 6), torch.ones(32, 1, 4)),
        LatentCache("fp4", torch.zeros(32, 4, 6)),
        torch.zeros(32, 4, 6, dtype=torch.uint8),
        torch.zeros(32, 4, 6).to(torch.float8_e4m3fn),
        torch.zeros(1, 4, 6).expand(32, 4, 6),
        LatentCache("fp8_block_token", torch.zeros(32, 4, 6), torch.ones(1, 1, 4).expand(32, 1, 4)),
    ],
    ids=[
        "block-size",
        "last-stride",
        "2d",
        "device",
        "none",
        "no-latents",
        "list-of-scales",
        "no-scales",
        "wider-scales",
        "scales-of-none",
        "format",
        "bytes",
        "e4m3",
        "one-block",
        "one-blocks-scales",
    ],
)
def test_tails_of_another_cache_are_not_copied(cache):
    """S-15: other blocks, rows that are not dense or overlap, and other scales are rejected."""
    with pytest.raises(InvalidArgument, match="cache"):
        draft_steps().copy_tails(cache, PREFIX_LENS, PREFIX_TABLE, BRANCH_BLOCKS)


@pytest.mark.parametrize(
    ("argument", "spoil"),
    [
        ("prefix_lens", lambda t: t.repeat_interleave(2)[::2]),
        ("branch_blocks", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
    ],
)
def test_strided_lengths_and_blocks_are_named(argument, spoil):
    """S-15: kernels read both dense."""
    given = {
        "prefix_lens": PREFIX_LENS, "prefix_table": PREFIX_TABLE, "branch_blocks": BRANCH_BLOCKS,
    }  # fmt: skip
    with pytest.raises(InvalidArgument) as error:
        draft_steps().fill(**(given | {argument: spoil(given[argument])}))
    assert error.value.argument == argument


@pytest.mark.parametrize(
    "committed",
    [
        torch.tensor([5, 0, 1], dtype=I32),
        torch.tensor(5, dtype=I32),
        torch.zeros(5, dtype=I32),
        torch.zeros(4),
        torch.zeros(4, dtype=I32, device="meta"),
    ],
    ids=["short", "one", "long", "float", "device"],
)
def test_an_extend_window_stays_where_it_is(committed):
    """S-17: graphs read its lengths at one address; other lengths than its rows are refused."""
    window = ExtendWindow(4, 3, "cpu")
    lens, address = window.seq_lens, window.seq_lens.data_ptr()
    with pytest.raises(InvalidArgument, match="committed"):
        window.fill(committed)
    assert window.seq_lens is lens
    assert (lens.data_ptr(), lens.shape) == (address, (4,))


def test_an_extend_window_is_not_its_own_input():
    """S-16: filled from its own lengths, it would extend what it has half overwritten."""
    window = ExtendWindow(2, 3, "cpu")
    window.fill(torch.tensor([5, 0], dtype=torch.int32))
    with pytest.raises(InvalidArgument, match="committed"):
        window.fill(window.seq_lens)
    assert window.seq_lens.tolist() == [8, 0]
