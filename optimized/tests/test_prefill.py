import re

import numpy as np
import pytest
import torch
from prefill_step import NOPE, V, assert_close, build, config, dense, prefix_sums

from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.prefill import portable as launchers
from paged_mla_optimized.operations.prefill.portable import PrefillPlan
from paged_mla_optimized.runtime.device import DeviceFacts
from paged_mla_shared.errors import InvalidArgument, Unsupported

ROWS = {
    "one-token": ((1, 1),),
    "prompts": ((1, 1), (31, 31), (32, 32), (33, 33), (200, 200)),
    "context": ((70, 9), (200, 1), (65, 33), (160, 64)),
    "empty-rows": ((0, 0), (5, 5), (40, 0), (0, 0), (64, 64), (0, 0)),
    "no-keys": ((0, 3), (5, 5), (0, 40)),
    "more-queries-than-keys": ((3, 40), (40, 75), (1, 2)),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
@pytest.mark.parametrize("lens", ROWS.values(), ids=ROWS.keys())
def test_matches_dense_attention(lens, causal):
    """S-4, S-5, S-7: ragged rows, bottom-right causal or not, natural-log lse; NaN past the end."""
    step = build(*lens, causal=causal, spare_keys=40)
    assert_close(step.attend(), step)


def test_a_call_before_plan_is_an_error():
    """S-17: its tensors are right, so their shape is not what is wrong."""
    step = build((40, 7))
    with pytest.raises(InvalidArgument, match="attend: got 7 tokens, but no step with tokens is"):
        Prefill(step.config, "cpu").attend(*step.tensors)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
def test_a_row_does_not_touch_the_next(causal):
    """S-9: NaN in the keys and values of a row does not change the bits of other rows."""
    step = build((40, 7), (20, 20), (33, 33), causal=causal)
    expected = step.attend()
    for tensor in step.tensors[2:]:
        tensor[40:60] = torch.nan
    out, lse = step.attend()
    for mine, theirs in ((out, expected[0]), (lse, expected[1])):
        assert torch.equal(mine[:7], theirs[:7])
        assert torch.equal(mine[27:], theirs[27:])


def test_padded_tokens_are_blank():
    """S-6: tokens past the last row have (0, -inf), for any values."""
    step = build((40, 40), (9, 2), padded_tokens=70)
    assert_close(step.attend(), step)


def test_what_memory_held_before_a_plan_means_nothing():
    """S-9: engines that sleep give pages back, and wake to others with anything in them."""
    step = build((40, 40), (9, 2), (0, 0), padded_tokens=70)
    prefill = Prefill(step.config, "cpu")
    prefill._plan.tiles.fill_(3)
    prefill._plan.work.fill_(3)
    assert_close(step.attend(prefill), step)


@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_any_head_count(num_heads):
    """S-5: each head has keys of its own, and shares those with position."""
    step = build((70, 33), (5, 5), num_heads=num_heads)
    assert_close(step.attend(), step)


@pytest.mark.parametrize(
    "dims", [(48, 16, 64), (128, 64, 128), (192, 64, 256)], ids=["48", "deepseek", "glm"]
)
def test_any_head_dims(dims):
    """S-5: sizes that are sums of two powers of two, values wider than keys."""
    nope, rope, value = dims
    step = build((70, 40), qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
    assert_close(step.attend(), step, 1e-4)


def test_halves_of_one_projection():
    """S-9: k_nope and v are parts of a [K, H, 2 * D] tensor, queries parts of one tensor."""
    step = build((70, 40), (33, 33))
    expected = step.attend()
    projected = torch.cat([step.k_nope, step.v], dim=-1)
    step.k_nope, step.v = projected[..., :NOPE], projected[..., NOPE:]
    queries = torch.cat([step.q_nope, step.q_pe], dim=-1)
    step.q_nope, step.q_pe = queries[..., :NOPE], queries[..., NOPE:]
    step.k_pe = torch.cat([step.k_pe, step.k_pe], dim=-1)[:, : step.k_pe.shape[1]]
    for mine, theirs in zip(step.attend(), expected, strict=True):
        assert torch.equal(mine, theirs)


def test_given_outputs_are_written():
    """S-6: out= and lse= receive the output, with their own strides."""
    step = build((40, 12))
    prefill = Prefill(step.config, "cpu")
    step.plan(prefill)
    out = torch.full((12, 2, 2 * V), torch.nan)[..., V:]
    lse = torch.full((2, 12), torch.nan).T
    returned = prefill.attend(*step.tensors, out=out, lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert_close(returned, step)


def test_float16():
    """S-5: half precision in and out, float32 lse."""
    step = build((70, 40), (33, 33), dtype=torch.float16)
    out, lse = step.attend()
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert_close((out, lse), step, 2e-3)


def test_bits_of_a_row_are_its_own():
    """S-20: alone or between other rows, first or last, a row's output has the same bits."""
    step = build((90, 70), (200, 3), (64, 64), num_heads=3)
    out, lse = step.attend()
    token = key = 0
    for key_len, query_len in step.lens:
        alone = build((key_len, query_len), num_heads=3)
        lines = slice(token, token + query_len), slice(key, key + key_len)
        alone.q_nope, alone.q_pe = step.q_nope[lines[0]], step.q_pe[lines[0]]
        alone.k_nope, alone.k_pe, alone.v = (t[lines[1]] for t in step.tensors[2:])
        mine = alone.attend()
        assert torch.equal(mine[0], out[lines[0]])
        assert torch.equal(mine[1], lse[lines[0]])
        token, key = token + query_len, key + key_len


def test_one_plan_serves_every_layer():
    """S-20: attending again on one plan, with other tensors between, gives the same bits."""
    step, other = build((90, 70), (40, 3)), build((90, 70), (40, 3), seed=1)
    prefill = Prefill(step.config, "cpu")
    step.plan(prefill)
    first = prefill.attend(*step.tensors)
    assert_close(prefill.attend(*other.tensors), other)
    for mine, theirs in zip(prefill.attend(*step.tensors), first, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
@pytest.mark.parametrize("num_tokens", [0, 5, 30, 45])
def test_tokens_past_the_step_are_cut_off(num_tokens, causal):
    """S-17: other tokens of a row longer than T are right; nothing past T is written."""
    step = build((50, 5), (33, 40), (70, 20), causal=causal)
    out, lse = torch.full((65, 2, V), 7.0), torch.full((65, 2), 7.0)
    prefill = Prefill(step.config, "cpu")
    prefill.plan(prefix_sums([5, 40, 20]), prefix_sums([50, 33, 70]), num_tokens=num_tokens)
    queries = (tensor[:num_tokens] for tensor in step.tensors[:2])
    prefill.attend(*queries, *step.tensors[2:], out=out[:num_tokens], lse=lse[:num_tokens])
    expected, expected_lse = (torch.tensor(answer) for answer in dense(step))
    close = {"rtol": 2e-5, "atol": 2e-5, "check_dtype": False}
    torch.testing.assert_close(out[:num_tokens], expected[:num_tokens], **close)
    torch.testing.assert_close(lse[:num_tokens], expected_lse[:num_tokens], **close)
    assert (out[num_tokens:] == 7).all()
    assert (lse[num_tokens:] == 7).all()


def test_nothing_to_do():
    """S-2: no rows, or no tokens."""
    prefill = Prefill(config(), "cpu")
    empty = build()
    prefill.plan(prefix_sums([]), prefix_sums([]), num_tokens=0)
    assert prefill.attend(*empty.tensors)[0].shape == (0, 2, V)
    padded = build(padded_tokens=3)
    assert_close(padded.attend(), padded)


def planned(cfg):
    """Return a plan of tiles of 32 tokens."""
    return PrefillPlan(cfg, 32, DeviceFacts("interpreter", 1), torch.device("cpu"))


LENS = [
    ((1, 1), (300, 300), (129, 129), (0, 0), (1000, 5), (128, 128), (2000, 130)),
    ((3, 400), (400, 3), (0, 5), (64, 64), (257, 129)),
]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
@pytest.mark.parametrize("lens", LENS, ids=["prompts", "few-keys"])
def test_longest_tiles_first(lens, causal):
    """Every tile of every row once, with what it is, by the blocks of 128 keys it sees."""
    cfg = config(causal=causal, max_tokens=2048)
    plan = planned(cfg)
    keys, queries = ([row[i] for row in lens] for i in (0, 1))
    padding = 40
    plan.fill(prefix_sums(queries), prefix_sums(keys), sum(queries) + padding)
    expected = []
    for query_start, key_start, (key_len, query_len) in zip(
        [*prefix_sums(queries).tolist()],
        [*prefix_sums(keys).tolist()[:-1], 0],
        [*lens, (0, padding)],
        strict=True,
    ):
        for first in range(0, query_len, 32):
            count = min(32, query_len - first)
            context = key_len - query_len + first
            seen = context + count if causal else key_len
            order = -max(-(-seen // 128), 1)
            expected.append((order, [query_start + first, count, key_start, context, key_len]))
    expected.sort(key=lambda tile: tile[0])
    assert plan.work.tolist() == [len(expected), 2, 0, 0]
    assert len(expected) <= plan.most_tiles
    assert plan.tiles[: len(expected), :5].tolist() == [tile for _, tile in expected]


@pytest.mark.parametrize(
    ("num_heads", "keys", "queries", "group"),
    [
        (128, 8192, 8192, 4),  # 7 heads of 4 MB fit in 30 MB
        (24, 8192, 8192, 6),
        (11, 8192, 8192, 1),
        (16, 60000, 4096, 4),  # none fits, but 132 programs take 32 tiles of four heads at a time
        (16, 60000, 64, 16),
    ],
)
def test_groups_of_heads(num_heads, keys, queries, group):
    """Groups of one size: as many heads as fit in L2, or as it takes to give all programs work."""
    cfg = PrefillConfig(num_heads=num_heads, softmax_scale=1.0, max_rows=1, max_tokens=8192)
    plan = PrefillPlan(cfg, 128, DeviceFacts("interpreter", 132), torch.device("cpu"))
    plan.fill(prefix_sums([queries]), prefix_sums([keys]), queries)
    assert plan.work.tolist() == [-(-queries // 128), group, 0, 0]


@pytest.mark.parametrize(("num_heads", "group"), [(1, 1), (4, 2), (6, 3)])
def test_groups_of_heads_leave_nothing_out(monkeypatch, num_heads, group):
    """Each tile of each head once, in one group or several."""
    step = build((70, 40), (5, 5), (40, 33), num_heads=num_heads)
    key_bytes = (NOPE + V) * 4
    monkeypatch.setattr(launchers, "_L2_BYTES", 3 * 115 * key_bytes)  # three heads of all keys
    assert_close(step.attend(), step)
    plan = planned(step.config)
    plan.fill(prefix_sums([40, 5, 33]), prefix_sums([70, 5, 40]), 78)
    assert plan.work.tolist() == [5, group, 0, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_heads", 0),
        ("max_rows", 0),
        ("max_tokens", -1),
        ("num_heads", 2.0),
        ("v_head_dim", "32"),
        ("softmax_scale", 0.0),
        ("qk_nope_head_dim", 0),
        ("qk_rope_head_dim", 15),
        ("v_head_dim", 0),
    ],
)
def test_bad_configs(name, value):
    """What no implementation could accept is named."""
    with pytest.raises(InvalidArgument, match=name):
        config(**{name: value})


@pytest.mark.parametrize(
    ("rows", "num_tokens", "message"),
    [
        (9, 9, "cu_seqlens_q: got 10 entries; allowed: 1 to max_rows + 1 = 9"),
        (1, 513, "num_tokens: got 513; allowed: 0 to max_tokens = 512"),
    ],
)
def test_capacities(rows, num_tokens, message):
    """S-17: what was given, and which capacity it is past."""
    sums = prefix_sums([1] * rows)
    with pytest.raises(InvalidArgument, match=f"^{re.escape(message)}$"):
        Prefill(config(), "cpu").plan(sums, sums, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qk_nope_head_dim", 40),
        ("qk_nope_head_dim", 512),
        ("qk_nope_head_dim", 224),
        ("qk_rope_head_dim", 128),
        ("v_head_dim", 512),
        ("v_head_dim", 24),
        ("dtype", torch.float64),
    ],
)
def test_unsupported_configs(name, value):
    """What these kernels do not know is named too."""
    with pytest.raises(Unsupported, match=name):
        config(**{name: value})


def test_the_interpreter_has_no_bfloat16():
    with pytest.raises(Unsupported, match="bfloat16"):
        Prefill(config(dtype=torch.bfloat16), "cpu")


BAD_PLANS = {
    "cu_seqlens_q": {"cu_seqlens_q": prefix_sums([1] * 9)},
    "cu_seqlens_k": {"cu_seqlens_k": prefix_sums([1, 2, 3])},
    "num_tokens": {"num_tokens": 513},
    "num_tokens-float": {"num_tokens": 7.0},
}


@pytest.mark.parametrize(("name", "change"), BAD_PLANS.items(), ids=BAD_PLANS.keys())
def test_bad_plans(name, change):
    """Capacities and shapes, before any launch."""
    given = {
        "cu_seqlens_q": prefix_sums([3, 4]),
        "cu_seqlens_k": prefix_sums([3, 4]),
        "num_tokens": 7,
    }
    with pytest.raises(InvalidArgument, match=name.partition("-")[0]):
        Prefill(config(), "cpu").plan(**(given | change))


def test_integers_of_numpy():
    """S-2: what an engine counts with NumPy is as good as Python's."""
    step = build((20, 20), num_heads=np.int64(2), max_tokens=np.int32(40))
    prefill = Prefill(step.config, "cpu")
    prefill.plan(prefix_sums([20]), prefix_sums([20]), num_tokens=np.int64(20))
    assert_close(prefill.attend(*step.tensors), step)


@pytest.mark.parametrize("name", ["causal", "writes_empty"])
def test_flags_of_numpy(name):
    """S-4: kernels are compiled for Python's, which is another type to Triton."""
    assert getattr(config(**{name: np.bool_(0)}), name) is False
    assert getattr(config(**{name: np.bool_(1)}), name) is True
    with pytest.raises(InvalidArgument, match=name):
        config(**{name: 1})


NAMES = ("q_nope", "q_pe", "k_nope", "k_pe", "v")
BAD_TENSORS = [
    ("q_nope", lambda t: t[:-1]),
    ("q_pe", lambda t: t[..., :8]),
    ("k_nope", lambda t: t[:, :1]),
    ("k_pe", lambda t: t[:-1]),
    ("v", lambda t: t.half()),
    ("v", lambda t: t[:-1]),
    ("k_nope", lambda t: t.mT.contiguous().mT),
    ("k_nope", lambda t: t.as_strided((1, 2, NOPE), (1 << 24, NOPE, 1))),
]


@pytest.mark.parametrize(
    ("name", "spoil"), BAD_TENSORS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD_TENSORS)]
)
def test_bad_tensors(name, spoil):
    """Shapes, dtypes and strides, before any launch."""
    step = build((20, 20))
    prefill = Prefill(step.config, "cpu")
    step.plan(prefill)
    tensors = dict(zip(NAMES, step.tensors, strict=True))
    with pytest.raises(InvalidArgument, match=name):
        prefill.attend(**(tensors | {name: spoil(tensors[name])}))


def test_bad_outputs():
    """Given outputs are held to what they should be."""
    step = build((20, 20))
    prefill = Prefill(step.config, "cpu")
    step.plan(prefill)
    with pytest.raises(InvalidArgument, match="out"):
        prefill.attend(*step.tensors, out=torch.empty(20, 2, V - 16))
    with pytest.raises(InvalidArgument, match="lse"):
        prefill.attend(*step.tensors, lse=torch.empty(20, 3))
