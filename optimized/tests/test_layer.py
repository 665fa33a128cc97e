"""The layer between its projections, held against float64 attention over the same latents."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from fp8_step import build_fp8
from mla_step import P, R, Step, build, config, dense

from paged_mla_optimized import HeadWeights, LayerConfig, MlaConfig, MlaLayer
from paged_mla_optimized.api.layer import PlannedLayerStep
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Rope, RopePairing

N, V = 16, 32
ROWS = ((33, 1), (70, 3), (0, 2), (30, 30), (5, 0), (60, 7))
ROOM = 50  # of 193 keys of the rows with queries
HEADS = 2


def weights_of(num_heads: int, dtype: torch.dtype = torch.float32) -> HeadWeights:
    generator = torch.Generator().manual_seed(9)
    by_head = torch.randn(num_heads, N + V, R, generator=generator) * R**-0.5
    return HeadWeights(by_head.to(dtype), N)


def layer_config(attention: MlaConfig, room: int | None = None) -> LayerConfig:
    return LayerConfig(attention=attention, qk_nope_head_dim=N, v_head_dim=V, workspace_tokens=room)


def lens_of(step: Step) -> dict[str, list[int]]:
    """Return what the host knows of a step."""
    return {"query_lens": [q for _, q in step.rows], "max_seq_lens": [n for n, _ in step.rows]}


def queries_of(step: Step, weights: HeadWeights) -> torch.Tensor:
    """Return queries [T, H, N + P], and leave what they are absorbed in `step`."""
    q_nope = torch.randn(*step.q_nope.shape[:2], N, generator=torch.Generator().manual_seed(5))
    q_nope[step.q_nope.isnan().any(-1)] = torch.nan
    q = torch.cat([q_nope.to(step.q_pe.dtype), step.q_pe], dim=-1)
    step.q_nope = torch.einsum("thn,hnr->thr", q[..., :N].double(), weights.w_uk.double())
    return q


def plan(
    layer: MlaLayer, step: Step, *, absorbed_rows: int | None = None, **host: object
) -> PlannedLayerStep:
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    planned = MlaStep(*lengths, num_tokens=len(step.q_nope), **host)
    return layer.plan(planned, absorbed_rows=absorbed_rows)


def attend(
    layer: MlaLayer, step: Step, q: torch.Tensor, weights: HeadWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((*q.shape[:2], V), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], torch.nan)
    return layer.attend(q[..., :N], q[..., N:], step.cache, weights, out=out, lse=lse)


def assert_right(
    answer: tuple[torch.Tensor, torch.Tensor],
    step: Step,
    weights: HeadWeights,
    tolerance: float = 2e-5,
) -> None:
    latents, lse = dense(step)
    out = torch.einsum("thr,hvr->thv", latents, weights.w_uv.double())
    torch.testing.assert_close(answer[0].double(), out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(answer[1].double(), lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("room", [ROOM, 1000], ids=["parts", "whole"])
@pytest.mark.parametrize("absorbed", [0, 2, 6], ids=["materialized", "mixed", "absorbed"])
def test_forms_have_equal_outputs(absorbed, room):
    """S-21: over NaN, with empty rows, rows without context and padding, for any chunks."""
    step = build(*ROWS, padded_tokens=3, num_heads=HEADS, max_query_tokens=46)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, room), "cpu")
    plan(layer, step, absorbed_rows=absorbed, **lens_of(step))
    assert_right(attend(layer, step, q, weights), step, weights)


def test_without_lengths_all_rows_are_absorbed():
    """S-21: what a captured step does."""
    step = build((33, 1), (70, 1), (0, 1), num_heads=HEADS)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config), "cpu")
    plan(layer, step)
    assert_right(attend(layer, step, q, weights), step, weights)


def test_a_call_before_plan_is_an_error():
    """S-17: its tensors are right, so their shape is not what is wrong."""
    step = build((20, 3), num_heads=HEADS, max_query_tokens=3)
    weights = weights_of(HEADS)
    layer = MlaLayer(layer_config(step.config), "cpu")
    with pytest.raises(InvalidArgument, match="attend: got 3 tokens, but no step with tokens is"):
        attend(layer, step, queries_of(step, weights), weights)


def test_bounds_may_be_loose():
    """S-9: parts that the host expects and the device does not have change nothing."""
    step = build((100, 7), (60, 20), num_heads=HEADS, max_query_tokens=27)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, 40), "cpu")
    plan(layer, step, query_lens=[7, 20], max_seq_lens=[200, 256], absorbed_rows=0)
    assert_right(attend(layer, step, q, weights), step, weights)


@pytest.mark.parametrize("room", [40, 1000], ids=["parts", "whole"])
@pytest.mark.parametrize("told", [[60, 60], [70, 30], [80, 1]])
def test_bounds_that_are_too_small(told, room):
    """S-9: keys past them are left out; nothing of an earlier step in the workspace is read."""
    step = build((80, 1), (90, 1), num_heads=HEADS, max_query_tokens=2)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, room), "cpu")
    host = {"query_lens": [1, 1], "max_seq_lens": told, "absorbed_rows": 0}
    answers = []
    for earlier in (torch.nan, 3.0):
        step.cache.nan_to_num_(earlier)
        layer.materialized._ckv.fill_(earlier)
        layer.materialized._k_pe.fill_(earlier)
        layer.materialized._keys_and_values.fill_(earlier)
        plan(layer, step, **host)
        answers.append(attend(layer, step, q, weights))
    for answer in zip(*answers, strict=True):
        assert answer[0].isfinite().all()
        assert torch.equal(*answer)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla"])
def test_fp8_caches(name):
    """S-11, S-21: both forms read what the cache holds, of the step's own tokens too."""
    step = build_fp8(name, (70, 3), (60, 20), num_heads=HEADS, max_query_tokens=23)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, 40), "cpu")
    plan(layer, step, absorbed_rows=1, **lens_of(step))
    assert_right(attend(layer, step, q, weights), step, weights)


def test_one_plan_serves_every_layer():
    """S-21: parts of one layer leave those of the next as planned."""
    step = build((50, 7), (40, 20), num_heads=HEADS, max_query_tokens=27)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, 40), "cpu")
    plan(layer, step, absorbed_rows=0, **lens_of(step))
    for _ in range(2):
        assert_right(attend(layer, step, q, weights), step, weights)


def test_no_step_is_attended_by_the_groups_of_the_one_before():
    """S-2, S-21: both groups, then one of them alone, whichever it is."""
    step = build((50, 7), (40, 20), (30, 1), padded_tokens=2, num_heads=HEADS)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config), "cpu")
    for absorbed in (1, 3, 0, 2, None):
        host = {} if absorbed is None else {"absorbed_rows": absorbed} | lens_of(step)
        plan(layer, step, **host)
        assert layer.absorbed_rows == (3 if absorbed is None else absorbed)
        assert_right(attend(layer, step, q, weights), step, weights)


@pytest.mark.parametrize("room", [64, 1000], ids=["parts", "whole"])
def test_lengths_are_read_by_plan_alone(room):
    """S-9: an engine may write the lengths of its next step once `plan` has run."""
    step = build((150, 2), (120, 20), (30, 7), padded_tokens=2, num_heads=HEADS)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, room), "cpu")
    lengths = step.cu_seqlens_q.clone(), step.seq_lens.clone()
    layer.plan(
        MlaStep(*lengths, step.block_table, num_tokens=len(q), **lens_of(step)), absorbed_rows=1
    )
    for tensor in lengths:
        tensor.zero_()
    assert_right(attend(layer, step, q, weights), step, weights)


@pytest.mark.parametrize("absorbed", [0, 1])
def test_a_rope_inside(absorbed):
    """S-12, S-21: keys are rotated as they are cached, queries at their own positions."""
    rope = Rope(RopePairing.NEOX)
    weights = weights_of(HEADS)
    generator = torch.Generator().manual_seed(2)
    tokens = {
        name: torch.randn(shape, generator=generator)
        for name, shape in (("ckv", (40, R)), ("k_pe", (40, P)), ("q", (40, HEADS, N + P)))
    }

    def answers(chunks, absorbed):
        """Attend to both rows in chunks of (first, last) positions; return out by position."""
        layer = MlaLayer(
            layer_config(config(rope=rope, num_heads=HEADS, max_query_tokens=40)), "cpu"
        )
        cache = torch.full((4, 16, R + P), torch.nan)
        table = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32)
        found = torch.empty(2, 20, HEADS, V)
        for begin, end in chunks:
            lines = torch.cat([torch.arange(begin, end) + 20 * row for row in (0, 1)])
            count = end - begin
            layer.plan(
                MlaStep(
                    torch.tensor([0, count, 2 * count], dtype=torch.int32),
                    torch.tensor([end, end], dtype=torch.int32),
                    table,
                    num_tokens=2 * count,
                    query_lens=[count, count],
                    max_seq_lens=[end, end],
                ),
                absorbed_rows=absorbed,
            )
            layer.append(tokens["ckv"][lines], tokens["k_pe"][lines], cache)
            q = tokens["q"][lines]
            out, _ = layer.attend(q[..., :N], q[..., N:], cache, weights)
            found[:, begin:end] = out.view(2, count, HEADS, V)
        return found

    whole = answers([(0, 20)], 2)
    torch.testing.assert_close(answers([(0, 13), (13, 20)], absorbed), whole, rtol=2e-5, atol=2e-5)


def test_base_2():
    """S-7: lse of both forms in the config's base."""
    step = build((33, 1), (60, 20), num_heads=HEADS, lse_base="2")
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config), "cpu")
    plan(layer, step, absorbed_rows=1, **lens_of(step))
    out, lse = attend(layer, step, q, weights)
    assert_right((out, lse * np.log(2)), step, weights)


def test_nothing_to_do():
    """S-2: rows without queries, a table of width 0, no rows at all."""
    weights = weights_of(HEADS)
    layer = MlaLayer(layer_config(config(num_heads=HEADS)), "cpu")
    for rows, padded in (((), 3), (((0, 2),), 0), ((), 0)):
        step = build(*rows, padded_tokens=padded, num_heads=HEADS)
        step.block_table = step.block_table[:, :0]
        q = queries_of(step, weights)
        plan(layer, step, absorbed_rows=0, **lens_of(step))
        assert_right(attend(layer, step, q, weights), step, weights)


def test_a_slow_order_of_rows_is_logged_once(caplog):
    """S-21: decode rows after a prompt are correct, slow, and logged; before it, nothing is."""
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_heads": 16}
    attention = config(max_query_tokens=2048, max_model_len=8192, **widths)
    layer = MlaLayer(LayerConfig(attention=attention, workspace_tokens=2048), "cpu")
    for queries, told in (([*[1] * 7, 2041], 0), ([2041, *[1] * 7], 1), ([2041, *[1] * 7], 1)):
        keys = [n if n > 1 else 8192 for n in queries]
        layer.plan(
            MlaStep(
                torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
                torch.tensor(keys, dtype=torch.int32),
                torch.zeros(8, 512, dtype=torch.int32),
                num_tokens=sum(queries),
                query_lens=queries,
                max_seq_lens=keys,
            )
        )
        assert len(caplog.records) == told


@pytest.mark.parametrize("queries", [[2, 1], [1, 2], [0, 0]])
def test_rows_that_see_no_keys(queries):
    """S-2: a step of padded rows is planned in any order."""
    attention = config(num_heads=HEADS)
    layer = MlaLayer(layer_config(attention), "cpu")
    layer.plan(
        MlaStep(
            torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, 0, dtype=torch.int32),
            num_tokens=3,
            query_lens=queries,
            max_seq_lens=[0, 0],
        )
    )
    q, cache = torch.zeros(3, HEADS, N + P), torch.zeros(1, 16, R + P)
    out, lse = layer.attend(q[..., :N], q[..., N:], cache, weights_of(HEADS))
    assert not out.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("room", [2, 40, 1000])
def test_a_part_whose_only_key_is_no_number_is_not_empty(room):
    """S-8: the outputs of other chunks do not hide its output."""
    step = build((80, 1), (90, 1), num_heads=2, max_query_tokens=2)
    weights = weights_of(2)
    step.cache[step.block_table[0, 79 // 16], 79 % 16] = torch.nan
    layer = MlaLayer(layer_config(step.config, room), "cpu")
    plan(layer, step, absorbed_rows=0, **lens_of(step))
    out, lse = attend(layer, step, queries_of(step, weights), weights)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert lse[1].isfinite().all()


def test_weights_that_are_parameters():
    """S-21: a model's own, with gradients left on."""
    step = build((33, 1), (60, 20), num_heads=HEADS)
    by_head = torch.nn.Parameter(weights_of(HEADS).kv_b_proj.clone())
    weights = HeadWeights.of_kv_b_proj(by_head, HEADS, N)
    assert weights.w_uk.data_ptr() == by_head.data_ptr()
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config), "cpu")
    plan(layer, step, absorbed_rows=1, **lens_of(step))
    assert_right(attend(layer, step, q, weights), step, weights)


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "out"])
def test_tokens_too_far_apart(name):
    """S-5: rejected before the outputs of absorbed rows are written."""
    step = build((33, 1), (70, 1), num_heads=HEADS)
    layer = MlaLayer(layer_config(step.config), "cpu")
    plan(layer, step, absorbed_rows=1, **lens_of(step))
    given = {
        "q_nope": torch.zeros(2, HEADS, N),
        "q_pe": torch.zeros(2, HEADS, P),
        "out": torch.full((2, HEADS, V), torch.nan),
        "lse": torch.full((2, HEADS), torch.nan),
    }
    far = torch.empty(2, 1 << 24)[:, : given[name][0].numel()].view(given[name].shape)
    far.copy_(given[name])
    with pytest.raises(InvalidArgument, match=name):
        layer.attend(cache=step.cache, weights=weights_of(HEADS), **(given | {name: far}))
    assert given["out"].isnan().all()
    assert given["lse"].isnan().all()


def test_weights_from_both_sources():
    """S-21: kv_b_proj without a copy, or separate W_UK and W_UV; a rank has its own heads."""
    by_head = torch.randn(6, N + V, R)
    whole = HeadWeights.of_kv_b_proj(by_head[2:4].flatten(0, 1), 2, N)
    halves = HeadWeights.of_halves(by_head[2:4, :N], by_head[2:4, N:])
    for weights in (whole, halves):
        assert torch.equal(weights.w_uk, by_head[2:4, :N])
        assert torch.equal(weights.w_uv, by_head[2:4, N:])


LINES = HEADS * (N + V)
STRIDED = {  # what a model owns, and the weights made of it
    "dense": ((LINES, R), lambda w: HeadWeights.of_kv_b_proj(w, HEADS, N)),
    "transposed": ((R, LINES), lambda w: HeadWeights.of_kv_b_proj(w.T, HEADS, N)),
    "columns": ((LINES, R + 8), lambda w: HeadWeights.of_kv_b_proj(w[:, 8:], HEADS, N)),
    "lines": ((2 * LINES, R), lambda w: HeadWeights.of_kv_b_proj(w[LINES:], HEADS, N)),
    "every-other": ((LINES, 2 * R), lambda w: HeadWeights.of_kv_b_proj(w[:, ::2], HEADS, N)),
    "lines-first": ((N + V, HEADS, R), lambda w: HeadWeights(w.transpose(0, 1), N)),
    "heads": ((HEADS, 9 + N + V, R), lambda w: HeadWeights(w[:, 9:], N)),
    "halves": (
        (HEADS, 9 + N + V, R),
        lambda w: HeadWeights.of_halves(w[:, 9 + V :], w[:, :V]),
    ),
    "transposed-halves": (
        (HEADS, R, N + V),
        lambda w: HeadWeights.of_halves(w[..., :N].mT, w[..., N:].mT),
    ),
    "of-heads": ((R, 2 * LINES), lambda w: _rank(HeadWeights.of_kv_b_proj(w.T, 2 * HEADS, N))),
    "of-halves-of-heads": (
        (2 * HEADS, N + V, R),
        lambda w: _rank(HeadWeights.of_halves(w[:, :N], w[:, N:])),
    ),
}


def _rank(weights: HeadWeights) -> HeadWeights:
    return weights.of_heads(range(HEADS, 2 * HEADS))


@pytest.mark.parametrize(("shape", "weights_in"), STRIDED.values(), ids=STRIDED.keys())
def test_weights_follow_an_update_in_place(shape, weights_in):
    """S-21: for any strides, both forms read the current values of the model's own tensor."""
    step = build((33, 1), (40, 9), num_heads=HEADS, max_query_tokens=10)
    owned = torch.nn.Parameter(torch.full(shape, torch.nan))
    weights = weights_in(owned)
    layer = MlaLayer(layer_config(step.config), "cpu")
    with torch.no_grad():
        owned.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(4)) * R**-0.5)
    assert weights.kv_b_proj.unflatten(0, (HEADS, -1)).equal(
        torch.cat([weights.w_uk, weights.w_uv], dim=1)
    )
    q = queries_of(step, weights)
    plan(layer, step, absorbed_rows=1, **lens_of(step))
    assert_right(attend(layer, step, q, weights), step, weights)


@pytest.mark.parametrize("absorbed_rows", [0, 1, 2])
def test_queries_that_ask_for_gradients(absorbed_rows):
    """S-21: they get outputs without gradients, in either form."""
    step = build((33, 1), (40, 9), num_heads=HEADS, max_query_tokens=10)
    weights = HeadWeights(torch.randn(HEADS, N + V, R) * R**-0.5, N)
    layer = MlaLayer(layer_config(step.config), "cpu")
    plan(layer, step, absorbed_rows=absorbed_rows, **lens_of(step))
    q = queries_of(step, weights)
    out, lse = attend(layer, step, q.clone().requires_grad_(), weights)
    assert not out.requires_grad
    assert_right((out, lse), step, weights)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("kv_b_proj", lambda: HeadWeights.of_kv_b_proj(torch.empty(7, R), 2, N)),
        ("kv_b_proj", lambda: HeadWeights.of_kv_b_proj(torch.empty(2 * N, R), 2, N)),
        ("by_head", lambda: HeadWeights(torch.empty(2, N, R), N)),
        ("by_head", lambda: HeadWeights(torch._neg_view(torch.empty(2, N + V, R)), N)),
        ("kv_b_proj", lambda: HeadWeights.of_kv_b_proj(torch.empty(8, R).to_sparse(), 2, N)),
        ("qk_nope_head_dim", lambda: HeadWeights(torch.empty(2, N, R), 0)),
        ("num_heads", lambda: HeadWeights.of_kv_b_proj(torch.empty(8, R), 0, N)),
        ("w_uv", lambda: HeadWeights.of_halves(torch.empty(2, N, R), torch.empty(3, V, R))),
        ("w_uk", lambda: HeadWeights.of_halves(torch.empty(2, 0, R), torch.empty(2, V, R))),
        ("w_uv", lambda: HeadWeights.of_halves(torch.empty(2, N, R), torch.empty(2, 0, R))),
        ("workspace_tokens", lambda: layer_config(config(), 63)),
        ("workspace_tokens", lambda: layer_config(config(), 64.5)),
        ("v_head_dim", lambda: LayerConfig(attention=config(), v_head_dim=32.0)),
        ("attention", lambda: LayerConfig(attention=None)),
    ],
)
def test_bad_weights_and_configs(argument, call):
    """What does not fit is named."""
    with pytest.raises(InvalidArgument, match=argument):
        call()


def test_no_fixed_bits():
    """S-20: refused, since products with weights depend on the batch."""
    with pytest.raises(Unsupported, match="batch_invariant"):
        layer_config(config(batch_invariant=True))


@pytest.mark.parametrize(
    ("argument", "host"),
    [
        ("max_seq_lens", {"query_lens": [1, 3]}),
        ("query_lens", {"query_lens": [1], "max_seq_lens": [33, 70]}),
        ("query_lens", {"query_lens": [1, 4], "max_seq_lens": [33, 70]}),
        ("query_lens", {"query_lens": [1, -1], "max_seq_lens": [33, 70]}),
        ("query_lens", {"query_lens": [1, 2.5], "max_seq_lens": [33, 70]}),
        ("query_lens", {"query_lens": [2**62, 2**62], "max_seq_lens": [0, 0]}),
        ("query_lens", {"query_lens": [1, 2**64 - 1], "max_seq_lens": [33, 70]}),
        ("max_seq_lens", {"query_lens": [1, 3], "max_seq_lens": [33, 2**63]}),
        ("max_seq_lens", {"query_lens": [1, 3], "max_seq_lens": [-33, 70]}),
        ("max_seq_lens", {"query_lens": [1, 3], "max_seq_lens": [33.0, 70.0]}),
        ("max_seq_lens", {"query_lens": [1, 3], "max_seq_lens": [33, 257]}),
        ("max_seq_lens", {"query_lens": [1, 3], "max_seq_lens": [33, 2]}),
        ("absorbed_rows", {"query_lens": [1, 3], "max_seq_lens": [33, 70], "absorbed_rows": 3}),
        ("absorbed_rows", {"query_lens": [1, 3], "max_seq_lens": [33, 70], "absorbed_rows": 1.0}),
        ("absorbed_rows", {"absorbed_rows": 0}),
        ("max_query_len", {"max_query_len": 2.5}),
        ("max_seq_lens", {"max_seq_lens": [33, 70]}),
        ("max_query_len", {"query_lens": [1, 3], "max_seq_lens": [33, 70], "max_query_len": 3}),
    ],
)
def test_bad_lengths(argument, host):
    """Lengths on the host must fit the step; checked before any launch."""
    step = build((33, 1), (70, 3))
    with pytest.raises(InvalidArgument, match=argument):
        plan(MlaLayer(layer_config(step.config), "cpu"), step, **host)


@pytest.mark.parametrize(
    "lens", [torch.tensor([1, 3], device="meta"), [[1], [1, 3]]], ids=["device", "ragged"]
)
def test_lengths_that_the_host_does_not_have(lens):
    """S-2: reading them would mean waiting for the device."""
    step = build((33, 1), (70, 3))
    layer = MlaLayer(layer_config(step.config), "cpu")
    message = r"query_lens: got a \w+; allowed: a sequence of integers on the host"
    with pytest.raises(InvalidArgument, match=message):
        plan(layer, step, query_lens=lens, max_seq_lens=[33, 70])


def test_what_lengths_of_the_host_have_to_fit():
    """S-2: the argument, what was given, and what it is held against."""
    step = build((33, 1), (70, 3))
    layer = MlaLayer(layer_config(step.config), "cpu")
    for name, host, told in (
        ("query_lens", ([1, 4], [33, 70]), "5 in all; allowed: up to num_tokens = 4"),
        ("query_lens", ([1], [33, 70]), "shape (1,); allowed: one length for each of 2 rows"),
        ("max_seq_lens", ([1, 3], [33, 257]), "257; allowed: up to max_model_len = 256"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{re.escape(f'{name}: got {told}')}$"):
            plan(layer, step, query_lens=host[0], max_seq_lens=host[1])


def test_a_count_of_tokens_that_is_none():
    """S-17: named as itself, not as lengths that do not fit in it."""
    step = build((33, 1), (70, 3))
    layer = MlaLayer(layer_config(step.config), "cpu")
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    with pytest.raises(InvalidArgument, match=r"^num_tokens: got -1; allowed: 0 to "):
        layer.plan(MlaStep(*lengths, num_tokens=-1, **lens_of(step)))


@pytest.mark.parametrize("lens", [[33, 70], torch.tensor(33), torch.tensor([33, 70])])
@pytest.mark.parametrize("host", [{}, {"query_lens": [1, 3], "max_seq_lens": [33, 70]}])
def test_lengths_that_are_none(lens, host):
    """S-2: no tensor of a length for each row."""
    step = build((33, 1), (70, 3))
    step.seq_lens = lens
    with pytest.raises(InvalidArgument, match="seq_lens"):
        plan(MlaLayer(layer_config(step.config), "cpu"), step, **host)


def test_integers_of_numpy():
    """S-2: what an engine counts with NumPy is as good as Python's."""
    step = build((33, 1), (70, 3), num_heads=HEADS)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, np.int64(64)), "cpu")
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    host = {name: np.array(lens) for name, lens in lens_of(step).items()}
    layer.plan(MlaStep(*lengths, num_tokens=np.int64(4), **host), absorbed_rows=np.int64(1))
    assert_right(attend(layer, step, q, weights), step, weights)
    with pytest.raises(InvalidArgument, match="num_tokens"):
        layer.plan(MlaStep(*lengths, num_tokens=4.0, **host))
    assert_right(attend(layer, step, q, weights), step, weights)


def test_all_rows_are_absorbed_where_the_mask_is_not_causal():
    """S-21: any other number is refused, not ignored; no memory is kept for other rows."""
    step = build((33, 1), (70, 3), mask="non_causal")
    layer = MlaLayer(layer_config(step.config), "cpu")
    assert layer.config.room == 0
    plan(layer, step, absorbed_rows=2, **lens_of(step))
    found = layer.explain(replace(step.described, **lens_of(step)))
    assert (found.absorbed_rows, found.materialized_rows, found.parts) == (2, 0, 0)
    with pytest.raises(InvalidArgument, match="absorbed_rows"):
        plan(layer, step, absorbed_rows=1, **lens_of(step))


BAD_TENSORS = [
    ("q_nope", {"q_nope": torch.empty(4, HEADS, N + 1)}),
    ("q_pe", {"q_pe": torch.empty(3, HEADS, P)}),
    ("w_uk", {"weights": weights_of(HEADS + 1)}),
    ("w_uk", {"weights": weights_of(HEADS, torch.float16)}),
    ("w_uv", {"weights": HeadWeights(torch.empty(HEADS, N + V + 16, R), N)}),
    ("out", {"out": torch.empty(4, HEADS, V).half()}),
    ("lse", {"lse": torch.empty(4, 5)}),
    ("cache", {"cache": torch.empty(4, 8, R + P)}),
]


@pytest.mark.parametrize(("argument", "change"), BAD_TENSORS)
def test_bad_tensors(argument, change):
    """Shapes, dtypes and the cache."""
    step = build((33, 1), (70, 3), num_heads=HEADS)
    layer = MlaLayer(layer_config(step.config), "cpu")
    plan(layer, step, absorbed_rows=1, **lens_of(step))
    given = {
        "q_nope": torch.zeros(4, HEADS, N),
        "q_pe": torch.zeros(4, HEADS, P),
        "cache": step.cache,
        "weights": weights_of(HEADS),
    }
    with pytest.raises(InvalidArgument, match=argument):
        layer.attend(**(given | change))


@pytest.mark.parametrize("seq_len", [2, -1, 2**31 - 1])
@pytest.mark.parametrize("absorbed", [0, 1, 3], ids=["materialized", "mixed", "absorbed"])
def test_rows_of_a_layer(absorbed, seq_len):
    """S-2: a row that is not allowed is padding in either form; other rows are unchanged."""
    step = build((33, 1), (70, 3), (30, 30), num_heads=HEADS, max_query_tokens=46)
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config, ROOM), "cpu")
    plan(layer, step, absorbed_rows=absorbed, **lens_of(step))
    whole = attend(layer, step, q, weights)
    step.seq_lens[1] = seq_len
    plan(layer, step, absorbed_rows=absorbed, **lens_of(step))
    out, lse = attend(layer, step, q, weights)
    legal = [0, *range(4, 34)]
    torch.testing.assert_close(out[legal], whole[0][legal], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse[legal], whole[1][legal], rtol=2e-5, atol=2e-5)
    assert (out[1:4] == 0).all()
    assert (lse[1:4] == -torch.inf).all()
    cache = torch.full(step.cache.shape, 7.0)
    layer.append(torch.ones(34, R), torch.ones(34, P), cache)
    assert int((cache == 1).all(-1).sum()) == 31


def test_short_rows_of_a_layer():
    """S-2: a non-causal row may have fewer keys than queries, also with lengths on the host."""
    step = build((1, 3), (33, 2), num_heads=HEADS, mask="non_causal")
    weights = weights_of(HEADS)
    q = queries_of(step, weights)
    layer = MlaLayer(layer_config(step.config), "cpu")
    plan(layer, step, **lens_of(step))
    latents, lse = dense(
        step, [torch.ones(3, 1, dtype=torch.bool), torch.ones(2, 33, dtype=torch.bool)]
    )
    out = torch.einsum("thr,hvr->thv", latents, weights.w_uv.double())
    answer = attend(layer, step, q, weights)
    torch.testing.assert_close(answer[0].double(), out, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(answer[1].double(), lse, rtol=2e-5, atol=2e-5)


def test_separate_weights_and_rows_without_keys():
    """S-6, S-21: a step of padding, and rows without keys next to an absorbed row."""
    layer = MlaLayer(layer_config(config(num_heads=HEADS)), "cpu")
    cache = layer.new_cache(4)
    weights = HeadWeights.of_halves(torch.randn(HEADS, N, R), torch.randn(HEADS, V, R))
    for query_lens, seq_lens, absorbed_rows in (([1], [0], None), ([1, 2], [5, 0], 1)):
        step = MlaStep.from_host(query_lens, seq_lens, [[0]] * len(seq_lens), device="cpu")
        layer.plan(step, absorbed_rows=absorbed_rows)
        q_nope = torch.randn(step.num_tokens, HEADS, N)
        out, lse = layer.attend(q_nope, torch.randn(*q_nope.shape[:2], P), cache, weights)
        padded = slice(0 if absorbed_rows is None else 1, None)
        assert (out[padded] == 0).all()
        assert (lse[padded] == -torch.inf).all()


def test_a_step_without_tokens_takes_a_cache_of_its_config_alone():
    layer = MlaLayer(layer_config(config(num_heads=HEADS)), "cpu")
    layer.plan(MlaStep.from_host([0], [0], [[0]], device="cpu"))
    q_nope, q_pe = torch.zeros(0, HEADS, N), torch.zeros(0, HEADS, P)
    with pytest.raises(InvalidArgument, match="cache"):
        layer.attend(q_nope, q_pe, torch.zeros(3, 3, 3), weights_of(HEADS))
    out, _ = layer.attend(q_nope, q_pe, layer.new_cache(3), weights_of(HEADS))
    assert out.shape == (0, HEADS, V)
