"""For any tensors on the device, rows that S-2 does not allow are padding, and ids stay in bounds.

Each test is a cell of the table in ``docs/contract.md``. Rows next to the illegal row keep the bits
of their outputs and of their cached tokens.
"""

import sys
from pathlib import Path

import pytest
import torch
from fp8_step import NAMES, empty_cache
from mla_step import P, R, Step, assert_close, build, config, dense

from paged_mla_optimized import DraftSteps, PagedMla, Prefill, RequestMap
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.shard.launch import Shard
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

sys.path.append(str(Path(__file__).parents[1] / "tests_misuse"))

from accesses import checked_accesses

I32 = torch.int32
SMALLEST, LARGEST = -(2**31), 2**31 - 1
ROWS = ((40, 3), (20, 4), (33, 2))  # (seq_len, query_len); the second is made illegal
LEGAL, ILLEGAL = [0, 1, 2, 7, 8], [3, 4, 5, 6]  # their tokens


@pytest.fixture(autouse=True)
def _checked():
    """Hold every address of a kernel against its tensors."""
    with checked_accesses():
        yield


def i32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def planned(step: Step, mask: torch.Tensor | None = None) -> PagedMla:
    mla = PagedMla(step.config, "cpu")
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    mla.plan(MlaStep(*lengths, num_tokens=len(step.q_nope), mask=mask))
    return mla


def appended(mla: PagedMla, step: Step, slots: torch.Tensor | None = None) -> torch.Tensor:
    """Return which slots of a cache of sevens an append of ones writes."""
    cache = torch.full(step.cache.shape, 7.0)
    tokens = len(step.q_nope)
    mla.append(torch.ones(tokens, R), torch.ones(tokens, P), cache, slots)
    assert ((cache == 7) | (cache == 1)).all()
    return (cache == 1).all(-1).flatten().nonzero().flatten()


def attended(mla: PagedMla, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs, which are written between tokens that must stay unchanged."""
    tokens, room = len(step.q_nope), 8
    outs = torch.full((tokens + 2 * room, *step.q_nope.shape[1:]), 5.0)
    lses = torch.full(outs.shape[:2], 5.0)
    inside = slice(room, room + tokens)
    mla.attend(step.q_nope, step.q_pe, step.cache, out=outs[inside], lse=lses[inside])
    for rest in (outs[:room], outs[room + tokens :], lses[:room], lses[room + tokens :]):
        assert (rest == 5).all()
    return outs[inside], lses[inside]


def assert_padded(step: Step, tokens: list[int] = ILLEGAL, legal: list[int] = LEGAL) -> None:
    """Hold a step with an illegal row against the same rows when all are legal."""
    mla = planned(step)
    whole = build(*ROWS)
    expected = dense(whole)
    out, lse = attended(mla, step)
    assert_close((out[legal], lse[legal]), (expected[0][legal], expected[1][legal]))
    assert (out[tokens] == 0).all()
    assert (lse[tokens] == -torch.inf).all()
    slots = planned(whole).slot_mapping[legal]
    assert mla.slot_mapping[tokens].tolist() == [-1] * len(tokens)
    assert mla.positions[tokens].tolist() == [0] * len(tokens)
    assert mla.slot_mapping[legal].tolist() == slots.tolist()
    assert appended(mla, step).tolist() == sorted(slots.tolist())


@pytest.mark.parametrize("seq_len", [1, 3, -1, SMALLEST, 257, LARGEST])
def test_lengths_that_no_row_has(seq_len):
    """S-2: shorter than its queries, below 0, past max_model_len."""
    step = build(*ROWS)
    step.seq_lens[1] = seq_len
    assert_padded(step)


def test_rows_that_the_table_is_too_narrow_for():
    """S-1: a row of three blocks in a table of two columns; the others need no more."""
    step = build((20, 3), (40, 4), (32, 2))
    expected = dense(step)
    step.block_table = step.block_table[:, :2]
    mla = planned(step)
    out, lse = attended(mla, step)
    assert_close((out[LEGAL], lse[LEGAL]), (expected[0][LEGAL], expected[1][LEGAL]))
    assert (out[ILLEGAL] == 0).all()
    assert (lse[ILLEGAL] == -torch.inf).all()
    assert mla.slot_mapping[ILLEGAL].tolist() == [-1] * 4


def test_a_table_without_columns():
    """S-9: no row has a block, so that rows with keys are padded."""
    step = build(*ROWS)
    step.block_table = step.block_table[:, :0]
    mla = planned(step)
    out, lse = attended(mla, step)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert len(appended(mla, step)) == 0


@pytest.mark.parametrize(
    ("cu_seqlens_q", "padded", "legal"),
    [
        ([0, 3, 7, 9], [], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ([-2, 3, 7, 9], [0, 1, 2], [3, 4, 5, 6, 7, 8]),
        ([SMALLEST, 3, 7, 9], [0, 1, 2], [3, 4, 5, 6, 7, 8]),
        ([0, 3, -5, 9], [3, 4, 5, 6, 7, 8], [0, 1, 2]),
        ([0, 3, 2, 9], [3, 4, 5, 6, 7, 8], [0, 1, 2]),
        ([0, 3, LARGEST, 9], [3, 4, 5, 6, 7, 8], [0, 1, 2]),
        ([LARGEST, 3, 7, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8], []),
    ],
)
def test_prefix_sums_that_are_none(cu_seqlens_q, padded, legal):
    """S-2: below 0, not ascending, far past the tokens: the rows that do not fit are padded."""
    step = build(*ROWS)
    step.cu_seqlens_q = i32(cu_seqlens_q)
    assert_padded(step, padded, legal)


@pytest.mark.parametrize("block", [-1, SMALLEST, LARGEST])
def test_block_ids_that_no_cache_has(block):
    """S-1, S-9: nothing is written there, and what is read of it are zeros."""
    step = build(*ROWS)
    expected = dense(step)
    step.block_table[1, 1] = block  # of keys 16 to 19: the tokens of this step
    mla = planned(step)
    slots = planned(build(*ROWS)).slot_mapping[LEGAL]
    assert appended(mla, step).tolist() == sorted(slots.tolist())
    out, lse = attended(mla, step)
    assert_close((out[LEGAL], lse[LEGAL]), (expected[0][LEGAL], expected[1][LEGAL]))
    step.keys[1][16:] = 0
    assert_close((out, lse), dense(step))


def test_a_block_just_past_the_cache():
    """S-9: as any other id that the cache does not have."""
    step = build(*ROWS)
    step.block_table[1, 0] = len(step.cache)
    out, lse = attended(planned(step), step)
    step.keys[1][:16] = 0
    assert_close((out, lse), dense(step))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_short_rows_of_a_non_causal_mask(batch_invariant):
    """S-2: every query sees all keys; those in front of the row's first position have no slot."""
    rows = ((1, 3), (40, 2), (5, 7))
    step = build(*rows, mask="non_causal", batch_invariant=batch_invariant)
    mla = planned(step)
    out, lse = attended(mla, step)
    sees = [torch.ones(query_len, seq_len, dtype=torch.bool) for seq_len, query_len in rows]
    assert_close((out, lse), dense(step, sees))
    own = [step.block_table[0, 0] * 16, *(step.block_table[2, 0] * 16 + torch.arange(5))]
    others = step.block_table[1, 2] * 16 + torch.arange(6, 8)
    wanted = [-1, -1, own[0], *others, -1, -1, *own[1:]]
    assert mla.slot_mapping.tolist() == [int(slot) for slot in wanted]
    assert mla.positions.tolist() == [0, 0, 0, 38, 39, 0, 0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", [None, *NAMES])
def test_named_slots_stay_in_the_cache(name):
    """S-10: a slot below 0 or past the cache writes nothing, in any format."""
    step = build((9, 9))
    mla = PagedMla(config(cache_format=name or "fp32"), "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=9))
    whole = empty_cache(name, 5, 16) if name else None
    rows = torch.full((5, 16, R + P), 7.0) if whole is None else whole.latents
    before = rows.clone()
    inner = rows[1:4] if whole is None else type(whole)(
        name, rows[1:4], whole.scales if whole.scales is None or not whole.scales.ndim
        else whole.scales[1:4],
    )  # fmt: skip
    slots = torch.tensor([48, 5, -(2**63), 2**63 - 1, -1, 49, 2**31, 2**32 + 3, -17])
    mla.append(torch.ones(9, R), torch.ones(9, P), inner, slots)
    changed = (rows != before).any(-1).nonzero().tolist()
    assert changed == [[1, 5]]
    if whole is not None and whole.scales is not None and whole.scales.ndim:
        assert (whole.scales[[0, 2, 3, 4]] == 7).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seq_len", [2, 300, -4])
def test_illegal_rows_next_to_fp8_rows(name, seq_len):
    """S-2, S-11: the plan's own slots, of rows with scales too."""
    step = build(*ROWS, cache_format=name)
    caches = [empty_cache(name, len(step.cache), 16) for _ in range(2)]
    for cache, length in zip(caches, (0, seq_len), strict=True):
        step.seq_lens[1] = length
        planned(step).append(torch.ones(9, R), torch.ones(9, P), cache)
    assert torch.equal(caches[0].latents, caches[1].latents)
    if caches[0].scales is not None:
        assert torch.equal(caches[0].scales, caches[1].scales)


TREE = {"mask": "tree:qlen", "max_draft_tokens": 4}


def tree_rows(mask: torch.Tensor, **changes: object) -> tuple[PagedMla, Step]:
    step = build((20, 4), (24, 4), **(TREE | changes))
    return planned(step, mask), step


@pytest.mark.parametrize("missing", [1, 16, 17, 32])
def test_masks_that_are_too_short(missing):
    """S-14: a row whose elements are not in the mask is padded; rows before it are not."""
    lines = torch.ones(4, 4, dtype=torch.bool).tril().flatten()
    mla, step = tree_rows(torch.cat([lines, lines])[: 32 - missing])
    out, lse = attended(mla, step)
    expected = dense(step)
    live = 4 if missing <= 16 else 0
    assert_close((out[:live], lse[:live]), (expected[0][:live], expected[1][:live]))
    assert (out[live:] == 0).all()
    assert (mla.slot_mapping[:live] >= 0).all()
    assert (mla.slot_mapping[live:] == -1).all()


def test_full_masks_that_are_too_short():
    """S-14: as of the other spelling; the first row's elements are those of all its keys."""
    step = build((20, 4), (24, 4), **(TREE | {"mask": "tree:full"}))
    mla = planned(step, torch.ones(20 * 4 + 24 * 4 - 1, dtype=torch.bool))
    assert (mla.slot_mapping[:4] >= 0).all()
    assert (mla.slot_mapping[4:] == -1).all()


@pytest.mark.parametrize("spelling", ["tree:qlen", "tree:full"])
@pytest.mark.parametrize("start", [SMALLEST, SMALLEST + 3, LARGEST])
def test_rows_that_do_not_ascend_have_no_elements_of_a_mask(start, spelling):
    """S-14: a start far below or above its neighbours leaves both rows at it without elements.

    The difference of two such entries does not fit in int32, and must not wrap to a length.
    """
    step = build((20, 4), (24, 4), (24, 4), (24, 4), **(TREE | {"mask": spelling}))
    step.cu_seqlens_q = i32([0, 4, start, 8, 12])
    widths = (20, 24) if spelling == "tree:full" else (4, 4)
    mask = torch.ones(4 * sum(widths), dtype=torch.bool)
    slots = planned(step, mask).slot_mapping
    assert (slots[:4] >= 0).all()
    assert (slots[4:8] == -1).all()
    last_is_legal = start < 0
    assert ((slots[8:12] >= 0) == last_is_legal).all()


def test_trees_of_more_nodes_than_the_config_has():
    """S-14: bits of at most max_draft_tokens nodes are kept."""
    step = build((20, 5), (24, 4), **TREE)
    mla = planned(step, torch.ones(41, dtype=torch.bool))
    assert (mla.slot_mapping[:5] == -1).all()
    assert (mla.slot_mapping[5:] >= 0).all()


def test_nodes_that_do_not_see_themselves():
    """S-3: their position is below the tree's, and none is below 0, where no angle is."""
    rope = Rope(RopePairing.NEOX)
    step = build((4, 4), (24, 4), rope=rope, **TREE)
    mla = planned(step, torch.zeros(32, dtype=torch.bool))
    assert mla.positions.tolist() == [0, 0, 0, 0, 19, 19, 19, 19]
    attended(mla, step)


@pytest.mark.parametrize("fill", [-1, 0, 1])
@pytest.mark.parametrize(
    ("ids", "lens"),
    [([0, -1], [20, 20]), ([0, 2], [20, 20]), ([0, 2**31 - 1], [20, 20]), ([0, 1], [20, 65])],
    ids=["negative", "past-the-map", "largest", "longer-than-the-map"],
)
def test_request_ids_and_lengths_that_no_map_has(ids, lens, fill):
    """S-1: such a row is padded, and the map is not read for it."""
    cfg = config(table_multiple=1, table_fill=fill, max_model_len=256)
    mla = PagedMla(cfg, "cpu")
    req_to_token = torch.arange(2 * 64, dtype=I32).view(2, 64)
    mla.plan(MlaStep(i32([0, 1, 2]), i32(lens), RequestMap(req_to_token, i32(ids)), num_tokens=2))
    assert mla.slot_mapping.tolist() == [19, -1]
    step = build((20, 1), (20, 1))
    mla.append(torch.ones(2, R), torch.ones(2, P), step.cache)
    mla.attend(step.q_nope, step.q_pe, step.cache)


@pytest.mark.parametrize("fill", [-1, 0, 1])
def test_slots_that_no_map_has(fill):
    """S-1: a slot below 0 is in no block, for every value of entries without a block."""
    cfg = config(table_multiple=1, table_fill=fill)
    mla = PagedMla(cfg, "cpu")
    req_to_token = torch.arange(64, dtype=I32).view(1, 64)
    req_to_token[0, 16:32] = -1
    mla.plan(MlaStep(i32([0, 2]), i32([33]), RequestMap(req_to_token, i32([0])), num_tokens=2))
    assert mla.block_table[0, :4].tolist() == [0, -1, 2, fill]
    assert mla.slot_mapping.tolist() == [-1, 32]


@pytest.mark.parametrize(
    ("starts", "lens", "live"),
    [
        ([0, 2, 4], [9, 1], [0, 1]),
        ([0, 2, 4], [9, -3], [0, 1]),
        ([0, 2, 4], [9, 129], [0, 1]),
        ([0, 2, 4], [9, LARGEST], [0, 1]),
        ([-2, 2, 4], [9, 20], [2, 3]),
        ([0, 2, 1], [9, 20], [0, 1]),
        ([3, 2, 4], [9, 20], []),
        ([0, LARGEST, 4], [LARGEST, 20], []),
    ],
)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_of_ranks(starts, lens, live, world):
    """S-2, S-18: what a rank does not allow is padding on it, as on the device that has it all."""
    cfg = config(max_query_tokens=4, max_model_len=128)
    for rank in range(world):
        shard = Shard(
            cfg, world=world, rank=rank, interleave=1, table_width=8, device=torch.device("cpu")
        )
        guarded = torch.full((4, 8), 99, dtype=I32)
        shard.block_table.copy_(guarded)
        table = torch.arange(2 * 8, dtype=I32).view(2, 8)
        shard.launch(i32(starts), i32(lens), table, 4)
        found = {t for t in range(4) if shard.positions[t] > 0}
        assert found == set(live)
        padded = [t for t in range(4) if t not in live]
        assert (shard.local_lens[padded] == 0).all()
        assert (shard.slot_mapping[padded] == -1).all()
        assert (shard.block_table[padded] == 99).all()


def test_a_rank_has_a_narrow_table():
    """S-18: a row of more blocks than columns is padded."""
    cfg = config(max_query_tokens=2, max_model_len=128)
    shard = Shard(cfg, world=2, rank=0, interleave=1, table_width=4, device=torch.device("cpu"))
    shard.launch(i32([0, 1, 2]), i32([65, 63]), torch.arange(4, dtype=I32).view(2, 2), 2)
    assert shard.local_lens.tolist() == [0, 32]


@pytest.mark.parametrize("prefix_len", [-1, 33, SMALLEST, LARGEST])
def test_prefixes_that_no_table_has(prefix_len):
    """S-15: a prefix of more tokens than its table has slots is a padded request."""
    drafts = DraftSteps(
        max_requests=2, branches=2, steps=2, prefix_width=2, own_width=2, block_size=16,
        device="cpu",
    )  # fmt: skip
    lens, table = i32([20, prefix_len]), i32([[1, 2], [3, 4]])
    own = torch.arange(5, 13, dtype=I32).view(2, 2, 2)
    drafts.fill(lens, table, own)
    assert drafts.seq_lens.tolist() == [[21, 21, 0, 0], [22, 22, 0, 0]]
    assert drafts.block_table[2:].tolist() == [[-1] * 4] * 2
    cache = torch.randn(13, 16, R + P)
    before = cache.clone()
    drafts.copy_tails(cache, lens, table, own)
    assert torch.equal(cache[[5, 7], :4], before[[2, 2], :4])
    before[[5, 7], :4] = cache[[5, 7], :4]
    assert torch.equal(cache, before)


@pytest.mark.parametrize("block", [-1, 13, LARGEST, SMALLEST])
@pytest.mark.parametrize("which", ["prefix_table", "branch_blocks"])
def test_tails_of_blocks_that_no_cache_has(which, block):
    """S-9: neither read nor written."""
    drafts = DraftSteps(
        max_requests=1, branches=1, steps=2, prefix_width=2, own_width=2, block_size=16,
        device="cpu",
    )  # fmt: skip
    given = {"prefix_table": i32([[1, 2]]), "branch_blocks": i32([[[3, 4]]])}
    given[which].flatten()[1 if which == "prefix_table" else 0] = block
    room = torch.randn(15, 16, R + P)
    before = room.clone()
    drafts.copy_tails(room[1:14], i32([20]), given["prefix_table"], given["branch_blocks"])
    assert torch.equal(room, before)


def prefill_step(starts: list[int], keys: list[int], *, causal: bool = True, tokens: int = 8):
    """Return the outputs of rows that share 12 keys, between guards that must stay unchanged."""
    cfg = PrefillConfig(
        num_heads=2, softmax_scale=0.2, max_rows=4, max_tokens=16, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, dtype=torch.float32, causal=causal,
    )  # fmt: skip
    torch.manual_seed(0)
    prefill = Prefill(cfg, "cpu")
    q_nope, q_pe = torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    k_nope, k_pe, v = torch.randn(12, 2, 16), torch.randn(12, 16), torch.randn(12, 2, 16)
    prefill.plan(i32(starts), i32(keys), num_tokens=tokens)
    outs, lses = torch.full((tokens + 8, 2, 16), 5.0), torch.full((tokens + 8, 2), 5.0)
    prefill.attend(q_nope, q_pe, k_nope, k_pe, v, out=outs[4:-4], lse=lses[4:-4])
    for rest in (outs[:4], outs[-4:], lses[:4], lses[-4:]):
        assert (rest == 5).all()
    return outs[4:-4], lses[4:-4]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("starts", "keys", "live"),
    [
        ([-1, 4, 8], [0, 6, 12], [4, 5, 6, 7]),
        ([1, 4, 8], [0, 6, 12], [4, 5, 6, 7]),
        ([0, 4, 3], [0, 6, 12], [0, 1, 2, 3]),
        ([0, LARGEST, 8], [0, 6, 12], None),
        ([0, 4, 8], [0, 6, 13], [0, 1, 2, 3]),
        ([0, 4, 8], [0, 6, LARGEST], [0, 1, 2, 3]),
        ([0, 4, 8], [0, 6, 5], [0, 1, 2, 3]),
        ([0, 4, 8], [-1, 6, 12], [4, 5, 6, 7]),
        ([0, 4, 8], [SMALLEST, 6, 12], [4, 5, 6, 7]),
        ([0, 4, 8], [2**30, SMALLEST, 12], []),
    ],
)
def test_prefix_sums_of_prefill(starts, keys, live, causal):
    """S-2, S-6: rows whose tokens or keys are not where the sums ascend from 0 are padded."""
    out, lse = prefill_step(starts, keys, causal=causal)
    assert out.isfinite().all()
    if live is None:  # the first row has all tokens, and its last ones are cut off
        return
    whole, whole_lse = prefill_step([0, 4, 8], [0, 6, 12], causal=causal)
    padded = [token for token in range(8) if token not in live]
    assert torch.equal(out[live], whole[live])
    assert torch.equal(lse[live], whole_lse[live])
    assert (out[padded] == 0).all()
    assert (lse[padded] == -torch.inf).all()
