"""Prefill on the device, with the Gluon kernel if it serves, and with the portable kernel."""

import random

import pytest
import torch
import triton
from gpu_prefill import LIMITS, Step, assert_close, build

from paged_mla_optimized import Prefill

ROWS = {
    "prompts": [(1, 1), (64, 64), (65, 65), (200, 200), (1000, 1000)],
    "tile-edges": [(127, 127), (128, 128), (129, 129), (191, 191), (192, 192), (193, 193)],
    "context": [(900, 5), (333, 128), (192, 64), (320, 192), (1900, 700), (4097, 1)],
    "empty-rows": [(0, 0), (3, 40), (0, 3), (64, 0), (140, 300), (0, 5), (5, 75)],
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
@pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_matches_dense_attention(rows, dtype, causal):
    """S-4, S-5, S-7: at DeepSeek's head sizes, over NaN."""
    step = build(rows, dtype=dtype, causal=causal, halves=True)
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert_close(step.attend(prefill), step)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 256)], ids=["hopper", "portable"])
def test_nothing_compiles_in_a_warm_prefill(dims, causal, monkeypatch):
    """Triton looks for no binary in any step."""
    nope, value = dims
    sizes = {"qk_nope_head_dim": nope, "v_head_dim": value, "causal": causal}
    steps = [build(rows, halves=True, **sizes) for rows in ROWS.values()]
    prefill = Prefill(steps[0].config)
    prefill.warm_up()
    looked_for = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **found: looked_for.append(found["src"].name)
    )
    for step in steps:
        step.plan(prefill)
        step.attend(prefill)
    assert looked_for == []


def test_other_head_sizes():
    """S-5: GLM's, on the portable kernel."""
    step = build([(300, 200), (65, 65)], qk_nope_head_dim=192, v_head_dim=256)
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert_close(step.attend(prefill), step)


def test_lines_that_tma_cannot_address():
    """S-9: lines of no multiple of 16 bytes, in the tiles of the same plan."""
    step = build(ROWS["prompts"])
    wide = torch.full((len(step.tensors[3]), 65), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :64] = step.tensors[3]
    step.tensors = (*step.tensors[:3], wide[:, :64], step.tensors[4])
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert_close(step.attend(prefill), step)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
def test_a_row_does_not_touch_the_next(causal):
    """S-9: NaN in the keys and values of a row does not change the bits of other rows."""
    step = build([(130, 130), (200, 200), (70, 64)], causal=causal)
    prefill = Prefill(step.config)
    step.plan(prefill)
    out, lse = step.attend(prefill)
    for tensor in step.tensors[2:]:
        tensor[130:330] = torch.nan
    for mine, theirs in zip(step.attend(prefill), (out, lse), strict=True):
        assert torch.equal(mine[:130], theirs[:130])
        assert torch.equal(mine[330:], theirs[330:])


@pytest.mark.parametrize("rows", [[(0, 3), (64, 64), (0, 70), (200, 5)], [(0, 7)], []])
def test_rows_without_keys_may_be_left_alone(rows):
    """S-6: without `writes_empty` they and padded tokens cost nothing and stay as they are."""
    step = build(rows, causal=False, writes_empty=False)
    prefill = Prefill(step.config)
    step.plan(prefill)
    answer = step.attend(prefill)
    expected = step.expected()
    token = 0
    for keys, queries in [*rows, (0, 100)]:
        mine = slice(token, token + queries)
        token += queries
        for actual, wanted in zip(answer, expected, strict=True):
            if keys == 0:
                assert actual[mine].isnan().all()
            else:
                torch.testing.assert_close(actual[mine].float(), wanted[mine], rtol=0, atol=2e-2)


@pytest.mark.parametrize(("width", "first"), [(192, 0), (136, 8), (131, 3)])
def test_outputs_go_to_the_passed_tensors(width, first):
    """S-6: lines of `out` aligned to 16 bytes or not; no memory next to them is written."""
    step = build(ROWS["prompts"])
    prefill = Prefill(step.config)
    step.plan(prefill)
    tokens, heads = step.tensors[0].shape[:2]
    wide = torch.full((tokens, heads, width), 7.0, dtype=torch.bfloat16, device="cuda")
    out = wide[..., first : first + 128]
    lse = torch.full((heads, tokens), torch.nan, device="cuda").T
    assert_close(prefill.attend(*step.tensors, out=out, lse=lse), step)
    assert (wide[..., :first] == 7).all()
    assert (wide[..., first + 128 :] == 7).all()


def test_many_tiles_for_each_program():
    """S-5: of every length, one after another in each program."""
    draw = random.Random(1)
    rows = [(n + draw.choice([0, 0, 1, 77, 300]), n) for n in draw.sample(range(1, 260), 40)]
    step = build(rows, num_heads=64, max_rows=40, max_tokens=8192)
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert_close(step.attend(prefill), step)


def test_bits_do_not_change():
    """S-20: for any program that takes a tile, and with or without other rows."""
    rows = [(700, 700), (130, 64), (64, 64), (1, 1), (333, 200)]
    step = build(rows, spare=0, num_heads=16)
    prefill = Prefill(step.config)
    step.plan(prefill)
    out, lse = step.attend(prefill)
    for _ in range(20):
        again = step.attend(prefill)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    token = key = 0
    for keys, queries in rows:
        mine, theirs = slice(token, token + queries), slice(key, key + keys)
        token, key = token + queries, key + keys
        tensors = (*(t[mine] for t in step.tensors[:2]), *(t[theirs] for t in step.tensors[2:]))
        alone = Step(step.config, [(keys, queries)], tensors)
        alone.plan(prefill)
        answer = alone.attend(prefill)
        assert torch.equal(answer[0], out[mine])
        assert torch.equal(answer[1], lse[mine])


STEPS = ([(700, 500), (40, 12)], [(300, 12), (440, 500)], [(740, 1)], [(64, 64), (5, 75), (0, 0)])


def test_a_graph_reads_lengths_again():
    """S-17: plan and attend captured once, replayed for other rows of at most as many tokens."""
    step = build([*STEPS[0], (0, 0)])
    prefill = Prefill(step.config)
    lens = step.lens
    tokens = len(step.tensors[0])
    prefill.plan(*lens, num_tokens=tokens)
    prefill.attend(*step.tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.plan(*lens, num_tokens=tokens)
        answer = prefill.attend(*step.tensors)
    for rows in STEPS:
        step.rows = rows + [(0, 0)] * (3 - len(rows))
        for mine, other in zip(lens, step.lens, strict=True):
            mine.copy_(other)
        graph.replay()
        assert_close(answer, step)


def test_kernels_that_overlap():
    """S-17: queries, plans and layers written, read and overwritten with no wait between."""
    step = build(STEPS[0], num_heads=16)
    prefill = Prefill(step.config)
    given, lens, expected = step.tensors[0], [], []
    for rows in STEPS:
        step.rows = rows
        lens.append(step.lens)
        step.plan(prefill)
        torch.cuda.synchronize()
        expected.append(step.attend(prefill))
    torch.cuda.synchronize()
    q_nope, out, lse = torch.empty_like(given), *map(torch.empty_like, expected[0])
    tensors = (q_nope, *step.tensors[1:])
    answers = []
    for i in range(40):
        prefill.plan(*lens[i % 4], num_tokens=len(given))
        q_nope.zero_()
        prefill.attend(*tensors, out=out, lse=lse)
        q_nope.copy_(given)
        prefill.attend(*tensors, out=out, lse=lse)
        answers.append((out.clone(), lse.clone(), i % 4))
        prefill.plan(*lens[(i + 1) % 4], num_tokens=len(given))
        prefill.attend(*tensors, out=out, lse=lse)
        answers.append((out.clone(), lse.clone(), (i + 1) % 4))
    for *answer, which in answers:
        assert torch.equal(answer[0], expected[which][0])
        assert torch.equal(answer[1], expected[which][1])


def test_two_instances_on_two_streams():
    """S-20: layers that run at the same time have the bits they have alone."""
    work = []
    for rows in ([(900, 700), (64, 64)], ROWS["prompts"]):
        step = build(rows, num_heads=16)
        prefill = Prefill(step.config)
        step.plan(prefill)
        work.append((step, prefill, torch.cuda.Stream(), step.attend(prefill)))
    torch.cuda.synchronize()
    answers = []
    for _ in range(20):
        for step, prefill, stream, expected in work:
            with torch.cuda.stream(stream):
                answers.append((prefill.attend(*step.tensors), expected))
    torch.cuda.synchronize()
    for actual, expected in answers:
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
