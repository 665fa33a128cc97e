"""Queries are quantized once a step, before a kernel of FP8 products reads them."""

import pytest
import torch
from fp8_step import codes, scale_of, values
from mla_step import P, R, build, config

from paged_mla_optimized import PagedMla
from paged_mla_optimized.operations.append.launch import append_choices, append_spec
from paged_mla_optimized.operations.queries.quantize import QuantizeQueries, quantize_spec
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing


def quantizer(**changes):
    """Return the launcher of a config, with arbitrary values in its buffers."""
    no_tables = torch.empty(0), torch.empty(0)
    quantize = QuantizeQueries(config(**changes), "interpreter", no_tables)
    quantize.codes.fill_(0xA5)
    quantize.scales.fill_(7.0)
    return quantize


def queries(tokens, num_heads, dtype=torch.float32):
    """Return q_nope and q_pe of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, num_heads, R + P, generator=generator)
    q *= 10.0 ** torch.randint(-3, 4, (tokens, num_heads, 1), generator=generator)
    return q[..., :R].to(dtype), q[..., R:].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_heads", [1, 3, 16])
def test_every_pair_has_a_scale(num_heads, dtype):
    """S-11: its largest magnitude, of q_nope or q_pe, is the largest code; others are rounded."""
    q_nope, q_pe = queries(7, num_heads, dtype)
    quantize = quantizer(num_heads=num_heads)
    found, scales = quantize.launch(q_nope, q_pe)
    q = torch.cat([q_nope, q_pe], -1).float()
    torch.testing.assert_close(scales[:7], scale_of(q), rtol=1e-6, atol=0.0)
    assert torch.equal(found[:7], codes(q / scales[:7, :, None]))
    assert ((found[:7] & 0x7F).amax(-1) == 0x7E).all()
    assert (found[7:] == 0xA5).all()
    assert (scales[7:] == 7.0).all()


def test_queries_of_zeros():
    """S-5: their scale is a number, and what it is multiplied by is 0."""
    found, scales = quantizer().launch(torch.zeros(2, 4, R), torch.zeros(2, 4, P))
    assert not values(found[:2]).any()
    assert (scales[:2] > 0).all()
    assert scales[:2].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [3, R + 5])
def test_what_is_no_number_stays_none(bad, column):
    """S-5: it is not the largest number, and the other codes of its query are as they were."""
    q = torch.cat(queries(2, 4), -1)
    q[..., column] = 0.0
    clean, clean_scales = (t.clone() for t in quantizer().launch(q[..., :R], q[..., R:]))
    q[1, 2, column] = bad
    found, scales = quantizer().launch(q[..., :R], q[..., R:])
    assert found[1, 2, column] & 0x7F == 0x7F
    found[1, 2, column] = clean[1, 2, column]
    assert torch.equal(found, clean)
    assert torch.equal(scales, clean_scales)


def test_strided_queries():
    """S-9: gaps between heads and tokens hold NaN and are never used."""
    q_nope, q_pe = queries(5, 4)
    expected = quantizer().launch(q_nope, q_pe)
    wide = torch.full((10, 6, R + P + 16), torch.nan)
    views = wide[::2, :4, :R], wide[::2, :4, R : R + P]
    for view, q in zip(views, (q_nope, q_pe), strict=True):
        view.copy_(q)
    for mine, theirs in zip(quantizer().launch(*views), expected, strict=True):
        assert torch.equal(mine, theirs)


def planned(**changes):
    """Return an instance with a planned step of 6 tokens, and the step."""
    step = build((20, 5), (7, 1), **changes)
    mla = PagedMla(step.config, "cpu")
    mla.plan(step.described)
    return mla, step


def test_an_engine_gets_what_the_kernels_get():
    """S-11: new tensors with a scale for each pair, for every cache format."""
    mla, step = planned()
    found, scales = mla.quantize_queries(step.q_nope, step.q_pe)
    expected, expected_scales = quantizer().launch(step.q_nope, step.q_pe)
    assert (found.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert torch.equal(found.view(torch.uint8), expected[:6])
    assert torch.equal(scales, expected_scales[:6])
    again, _ = mla.quantize_queries(step.q_nope, step.q_pe)
    assert again.data_ptr() != found.data_ptr()


def test_one_scale_for_all():
    """S-11: the scale is read on the device, at any address; quotients past 448 saturate."""
    mla, step = planned()
    scale = torch.tensor([torch.nan, 0.0007])[1]
    found, scales = mla.quantize_queries(step.q_nope, step.q_pe, scale=scale)
    q = torch.cat([step.q_nope, step.q_pe], -1)
    assert torch.equal(found.view(torch.uint8), codes(q / scale))
    assert torch.equal(scales, scale.expand(6, 4))


def test_queries_are_rotated_on_the_way():
    """S-12: as attention's own launch rotates them, at each token's position."""
    mla, step = planned(rope=Rope(RopePairing.NEOX))
    found, scales = mla.quantize_queries(step.q_nope, step.q_pe)
    rotated = mla._core.rotate.launch(step.q_pe, mla.positions)[:6]
    expected, expected_scales = quantizer().launch(step.q_nope, rotated)
    assert torch.equal(found.view(torch.uint8), expected[:6])
    assert torch.equal(scales, expected_scales[:6])
    assert not torch.equal(rotated, step.q_pe)


def test_a_step_without_tokens():
    """S-17: it launches nothing."""
    mla, step = planned()
    empty = torch.zeros(1, dtype=torch.int32)
    mla.plan(MlaStep(empty, empty[:0], step.block_table[:0], num_tokens=0))
    found, scales = mla.quantize_queries(step.q_nope[:0], step.q_pe[:0])
    assert (found.shape, scales.shape) == ((0, 4, R + P), (0, 4))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q_nope", lambda q_nope, q_pe: (q_nope[:5], q_pe, None)),
        ("q_pe", lambda q_nope, q_pe: (q_nope, q_pe.half(), None)),
        ("scale", lambda q_nope, q_pe: (q_nope, q_pe, torch.ones(1))),
        ("scale", lambda q_nope, q_pe: (q_nope, q_pe, torch.ones((), dtype=torch.float64))),
    ],
)
def test_what_does_not_fit_is_named(argument, change):
    """Before anything is launched."""
    mla, step = planned()
    q_nope, q_pe, scale = change(step.q_nope, step.q_pe)
    with pytest.raises(InvalidArgument, match=f"^{argument}: "):
        mla.quantize_queries(q_nope, q_pe, scale=scale)


@pytest.mark.parametrize(
    ("arch", "converts"), [("sm86", False), ("sm89", False), ("sm90", True), ("sm120", True)]
)
@pytest.mark.parametrize("cache_format", ["fp8_e4m3", "fp8_block_group"])
def test_codes_are_rounded_once(arch, converts, cache_format):
    """S-11: where Triton rounds twice, as on sm89, integers make the codes."""
    given = config(cache_format=cache_format)
    specs = [append_spec(given, arch, few=f, run_tokens=r) for f, r in append_choices(given)]
    specs.append(quantize_spec(given, arch, is_given=False))
    found = [spec.constants["NATIVE"] for spec in specs]
    assert found == [converts] * len(found)
