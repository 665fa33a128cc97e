"""Shapes, dtypes, strides and devices are looked at before any launch (S-9, S-10)."""

import re

import numpy as np
import pytest
import torch
from mla_step import P, R, assert_close, build, config, dense, of_fields

from paged_mla_optimized import LatentCache, LayerConfig, MlaLayer, PagedMla, Prefill
from paged_mla_optimized.api import core
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_optimized.runtime import device, layouts
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.triton_compat import interpreter
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Rope, RopePairing, Yarn


def on_meta(tensor):
    return tensor.to("meta")


def wide(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]  # last stride 2


def short(tensor):
    return tensor[:-1]


def negated(tensor):
    return torch._neg_view(-tensor)  # equal, and its memory holds the opposite


def sparse(tensor):
    return tensor.to_sparse()


PLAN = [
    ("seq_lens", "sparse", sparse),
    ("seq_lens", "negative-view", negated),
    ("block_table", "negative-view", negated),
    ("cu_seqlens_q", "int64", torch.Tensor.long),
    ("cu_seqlens_q", "short", short),
    ("seq_lens", "int64", torch.Tensor.long),
    ("seq_lens", "2d", lambda t: t[:, None]),
    ("block_table", "int64", torch.Tensor.long),
    ("block_table", "1d", lambda t: t[0]),
    ("block_table", "rows", short),
    ("block_table", "meta", on_meta),
    ("block_table", "none", lambda _: None),
    ("cu_seqlens_q", "list", lambda t: t.tolist()),
    ("seq_lens", "none", lambda _: None),
    ("seq_lens", "array", torch.Tensor.numpy),
]
ATTEND = [
    *((name, "sparse", sparse) for name in ("q_nope", "q_pe", "cache", "out", "lse")),
    *((name, "negative-view", negated) for name in ("q_nope", "q_pe", "cache", "out", "lse")),
    ("q_nope", "double", torch.Tensor.double),
    ("q_nope", "heads", lambda t: t[:, :-1]),
    ("q_nope", "strided", wide),
    ("q_nope", "meta", on_meta),
    ("q_pe", "tokens", short),
    ("q_pe", "width", lambda t: t[..., :-1]),
    ("cache", "half", torch.Tensor.half),
    ("cache", "block-size", lambda t: t[:, :8]),
    ("cache", "strided", wide),
    ("cache", "meta", on_meta),
    ("out", "half", torch.Tensor.half),
    ("out", "strided", wide),
    ("lse", "half", torch.Tensor.half),
    ("lse", "tokens", short),
    ("q_nope", "none", lambda _: None),
    ("q_nope", "array", torch.Tensor.numpy),
    ("q_pe", "list", lambda t: t.tolist()),
    ("cache", "none", lambda _: None),
    ("out", "list", lambda t: t.tolist()),
    ("out", "one-place", lambda t: t[:1].expand(t.shape)),
    ("lse", "one-place", lambda t: t[:1].expand(t.shape)),
]
APPEND = [
    *((name, "sparse", sparse) for name in ("ckv", "k_pe", "cache", "slot_mapping")),
    *((name, "negative-view", negated) for name in ("ckv", "k_pe", "cache", "slot_mapping")),
    ("ckv", "tokens", short),
    ("ckv", "double", torch.Tensor.double),
    ("ckv", "strided", wide),
    ("k_pe", "width", lambda t: t[:, :-1]),
    ("k_pe", "meta", on_meta),
    ("cache", "2d", lambda t: t.flatten(0, 1)),
    ("slot_mapping", "int32", torch.Tensor.int),
    ("slot_mapping", "short", short),
    ("ckv", "array", torch.Tensor.numpy),
    ("k_pe", "none", lambda _: None),
    ("slot_mapping", "list", lambda t: t.tolist()),
]


def spoilt(table):
    return pytest.mark.parametrize(
        ("argument", "spoil"),
        [(argument, spoil) for argument, _, spoil in table],
        ids=[f"{argument}-{name}" for argument, name, _ in table],
    )


def refused(call, argument, arguments, spoil):
    with pytest.raises(InvalidArgument) as error:
        call(**(arguments | {argument: spoil(arguments[argument])}))
    assert error.value.argument in {argument, "seq_lens", "cu_seqlens_q"}
    return error.value.argument


@spoilt(PLAN)
def test_plan_refuses(argument, spoil):
    """S-1, S-2: lengths and tables of a wrong form; of two that disagree either is named."""
    step = build((20, 3), (33, 1))
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    arguments = {name: getattr(step, name) for name in names} | {"num_tokens": 4}
    refused(of_fields(PagedMla(step.config, "cpu").plan), argument, arguments, spoil)


@spoilt(ATTEND)
def test_attend_refuses(argument, spoil):
    """S-5: queries, cache and outputs of a wrong form."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    out, lse = step.attend(mla)
    arguments = {"q_nope": step.q_nope, "q_pe": step.q_pe, "cache": step.cache}
    assert refused(mla.attend, argument, arguments | {"out": out, "lse": lse}, spoil) == argument


@spoilt(APPEND)
def test_append_refuses(argument, spoil):
    """S-10: latents, cache and slots of a wrong form; nothing is written."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    before = step.cache.clone()
    arguments = {
        "ckv": torch.ones(4, R),
        "k_pe": torch.ones(4, P),
        "cache": step.cache,
        "slot_mapping": torch.arange(4),
    }
    assert refused(mla.append, argument, arguments, spoil) == argument
    torch.testing.assert_close(step.cache, before, rtol=0, atol=0, equal_nan=True)


CAPACITIES = [
    ({"max_rows": 1}, "seq_lens: got 2 rows; allowed: at most max_rows = 1"),
    ({"max_query_tokens": 3}, "num_tokens: got 4; allowed: 0 to max_query_tokens = 3"),
]


@pytest.mark.parametrize(("changes", "message"), CAPACITIES, ids=["rows", "tokens"])
@pytest.mark.parametrize("call", ["plan", "check", "explain"])
def test_capacities(call, changes, message):
    """S-17: a step larger than the buffers is refused: what was given, and which capacity."""
    step = build((20, 3), (33, 1), **changes)
    mla = PagedMla(step.config, "cpu")
    given = {"num_blocks": 9} if call == "check" else {}
    with pytest.raises(InvalidArgument, match=f"^{re.escape(message)}$"):
        getattr(mla, call)(step.described, **given)


def test_queries_are_tensors_if_outputs_are_allocated():
    """S-5: `attend` reads their shape first."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    with pytest.raises(InvalidArgument, match="q_nope: got a ndarray; allowed: a Tensor"):
        mla.attend(step.q_nope.numpy(), step.q_pe, step.cache)


@pytest.mark.parametrize("call", ["append", "attend", "quantize_queries"])
def test_a_call_before_plan_is_an_error(call):
    """S-17: its tensors are right, so their shape is not what is wrong."""
    stored = {"cache_format": "fp8_e4m3"} if call == "quantize_queries" else {}
    step = build((20, 3), (33, 1), **stored)
    mla = PagedMla(step.config, "cpu")
    arguments = {
        "append": (torch.ones(4, R), torch.ones(4, P), step.cache),
        "attend": (step.q_nope, step.q_pe, step.cache),
        "quantize_queries": (step.q_nope, step.q_pe),
    }
    message = (
        f"{call}: got 4 tokens, but no step with tokens is planned; allowed: a call after plan"
    )
    with pytest.raises(InvalidArgument, match=message):
        getattr(mla, call)(*arguments[call])
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4))
    getattr(mla, call)(*arguments[call])


@pytest.mark.parametrize("name", ["ckv", "k_pe"])
def test_gathered_tokens_have_a_place_each(name):
    """S-9: one line of an expanded tensor would have the value that is written last."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    room = {"ckv": torch.zeros(53, R), "k_pe": torch.zeros(53, P)}
    room[name] = room[name][:1].expand(room[name].shape)
    with pytest.raises(InvalidArgument, match=f"{name}: got strides"):
        mla.gather_context(step.cache, **room)


@pytest.mark.parametrize("name", ["cache", "cache.scales"])
def test_cached_tokens_have_a_place_each(name):
    """S-10: in a cache made by expanding, tokens would overlap."""
    step = build((20, 3), (33, 1), cache_format="fp8_block_token")
    mla = PagedMla(step.config, "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4))
    blocks, size = step.cache.shape[:2]
    latents, scales = torch.zeros(blocks, size, R + P).byte(), torch.ones(blocks, 1, size)
    if name == "cache":
        latents = latents[:, :1].expand(-1, size, -1)
    else:
        scales = scales[:1].expand(blocks, -1, -1)
    cache = LatentCache("fp8_block_token", latents, scales)
    with pytest.raises(InvalidArgument, match=f"{name}: got strides"):
        mla.append(torch.zeros(4, R), torch.zeros(4, P), cache)


def test_a_device_that_there_is_not():
    """S-17: the error reports a device that this build of torch does not have."""
    with pytest.raises(Unsupported, match="device nonsense"):
        PagedMla(config(), "nonsense")


def test_a_device_without_memory():
    """S-17: the interpreter runs on what it can read."""
    with pytest.raises(Unsupported, match="device meta"):
        PagedMla(config(), "meta")


@pytest.mark.parametrize("rope", [None, Rope(RopePairing.NEOX, yarn=Yarn(40.0, 64))])
def test_the_default_device_is_not_used(rope):
    """S-12: a model is often built while tensors go to `meta`, or to a device of other cosines."""
    with torch.device("meta"):
        mla = PagedMla(config(rope=rope), "cpu")
    expected = PagedMla(mla.config, "cpu")._core.tables
    assert all(map(torch.equal, mla._core.tables, expected))


MADE_OF = {
    "step": lambda: PagedMla(LayerConfig(attention=config(), qk_nope_head_dim=16), "cpu"),
    "none": lambda: PagedMla(None, "cpu"),
    "layer": lambda: MlaLayer(config(), "cpu"),
    "prefill": lambda: Prefill(config(), "cpu"),
    "parallel": lambda: ContextParallelMla({}, device="cpu"),
}


@pytest.mark.parametrize("make", MADE_OF.values(), ids=MADE_OF)
def test_a_config_of_another_class(make):
    """S-17: what an instance is made of has a class of its own."""
    with pytest.raises(InvalidArgument, match=r"config: got .*; allowed: a \w+Config"):
        make()


@pytest.mark.parametrize("variant", [0, 16, "tile"])
def test_tiles_of_another_class(variant):
    """S-17: a name, or a number of pairs, does not determine the other constants."""
    with pytest.raises(InvalidArgument, match=r"variant: got a .*; allowed: a AttendVariant"):
        PagedMla(config(), "cpu", variant=variant)


def test_integers_of_numpy():
    """S-2: what an engine counts with NumPy is as good as Python's."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(config(num_heads=np.int64(4), reserved_slot=np.int32(0)), "cpu")
    assert type(mla.config.num_heads) is type(mla.config.reserved_slot) is int
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    lengths = {name: getattr(step, name) for name in names}
    mla.plan(MlaStep(**lengths, num_tokens=np.int64(4), max_query_len=np.int32(3)))
    assert_close(mla.attend(step.q_nope, step.q_pe, step.cache), dense(step))
    mla.check(MlaStep(**lengths, num_tokens=np.int64(4)), num_blocks=9)


@pytest.mark.parametrize(
    "given",
    [4.0, "4", None, torch.ones((), dtype=torch.bool), torch.tensor(3, device="meta")],
    ids=["float", "text", "none", "flag", "device"],
)
def test_numbers_that_are_none(given):
    """S-2: refused before anything is planned, or waited for: the step that was is as it was."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    expected = step.attend(mla)
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    lengths = {name: getattr(step, name)[:1] for name in names[1:]}
    lengths["cu_seqlens_q"] = step.cu_seqlens_q[:2]
    for call in (mla.plan, mla.check, mla.explain):
        with pytest.raises(InvalidArgument, match="num_tokens"):
            call(MlaStep(**lengths, num_tokens=given))
    with pytest.raises(InvalidArgument, match="max_query_len"):
        mla.plan(MlaStep(**lengths, num_tokens=3, max_query_len=2.5 if given is None else given))
    assert mla.attend(step.q_nope, step.q_pe, step.cache)[0].equal(expected[0])


TREE_MASKS = [
    ("tree:qlen", None),
    ("tree:qlen", torch.ones(10)),
    ("tree:qlen", torch.ones(4, 4, dtype=torch.bool)),
    ("tree:packed", torch.ones(4, 1, dtype=torch.bool)),
    ("tree:packed", torch.ones(3, 2, dtype=torch.uint8)),
    ("tree:packed", torch.ones(4, 1, dtype=torch.uint8)),
    ("causal", torch.ones(10, dtype=torch.bool)),
]


@pytest.mark.parametrize(
    ("spelling", "mask"),
    TREE_MASKS,
    ids=["missing", "float", "2d", "bool-packed", "lines", "narrow", "unexpected"],
)
def test_masks(spelling, mask):
    """S-14: a mask in another form than the config's spelling."""
    drafts = 9 if spelling != "causal" else 0
    step = build((20, 3), (33, 1), mask=spelling, max_draft_tokens=drafts)
    step.mask = mask
    with pytest.raises(InvalidArgument) as error:
        step.attend()
    assert error.value.argument == "mask"


def test_a_device_without_kernels(monkeypatch):
    """Refused when built, not when launched."""
    monkeypatch.setattr(device, "is_interpreting", lambda: False)
    with pytest.raises(Unsupported, match="cpu"):
        PagedMla(config(), "cpu")


@pytest.mark.parametrize("was", [(False, True), (True, False), (False, False)])
def test_an_interpreter_that_is_chosen_too_late(monkeypatch, was):
    """Triton reads the variable when it is imported, and its kernels when they are."""
    monkeypatch.setattr(interpreter, "_WHEN_IMPORTED", was)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET=1, which has changed since"):
        PagedMla(config(), "cpu")


@pytest.mark.parametrize(
    ("triton", "numpy", "works"),
    [
        ("3.6.0", "2.4.0", False),
        ("3.6.0", "2.10.1", False),
        ("3.6.0", "2.3.5", True),
        ("3.7.0", "2.4.0", True),
        ("3.8.0+git", "2.4.0rc1", True),
        ("3.9.0", "2.3.5", True),
        ("3.10.0", "2.4.0", False),
    ],
)
def test_interpreters_that_run_these_kernels(monkeypatch, triton, numpy, works):
    """Rejected at construction, by version; not checked on a GPU."""
    monkeypatch.setattr(interpreter.triton, "__version__", triton)
    monkeypatch.setattr(interpreter.np, "__version__", numpy)
    if works:
        PagedMla(config(), "cpu")
        return
    with pytest.raises(Unsupported, match=rf"interpreter of Triton {triton}.*not supported; use"):
        PagedMla(config(), "cpu")


def test_bfloat16_in_the_interpreter(monkeypatch):
    """S-11: its results are wrong there, so it is refused before anything is allocated."""
    monkeypatch.setattr(core, "Plan", None)
    with pytest.raises(Unsupported, match=r"bfloat16.*interpreter.*float32 or float16"):
        PagedMla(config(dtype=torch.bfloat16, cache_format="bf16"), "cpu")


def test_remembered_layouts_are_bounded(monkeypatch):
    """S-17: forgotten ones are looked at again, and refused again where they are wrong."""
    monkeypatch.setattr(layouts, "MAX_LAYOUTS", 2)
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    out, lse = step.attend(mla)
    expected = out.clone()
    for heads in range(4, 8):
        wide = torch.zeros(4, heads, R)[:, :4]
        mla.attend(step.q_nope, step.q_pe, step.cache, out=wide, lse=lse)
        assert torch.equal(wide, expected)
        assert len(mla._core._checked) <= 2
    with pytest.raises(InvalidArgument, match="out"):
        mla.attend(step.q_nope, step.q_pe, step.cache, out=out.half(), lse=lse)
