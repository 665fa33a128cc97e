"""Queries are rotated by a launch of their own, before the portable attend kernel reads them."""

import pytest
import torch
from mla_step import P, R, assert_close, build, config, dense

from paged_mla_optimized import PagedMla
from paged_mla_optimized.operations.queries.rope_tables import rope_tables
from paged_mla_optimized.operations.queries.rotate import RotateQueries, rotate_spec
from paged_mla_shared.problem import Rope, RopePairing

PAIRINGS = pytest.mark.parametrize("pairing", list(RopePairing))


def rotated(q_pe, positions, rope):
    """Return queries [T, H, P] turned in float64 at their tokens' positions (S-12)."""
    cos, sin = (
        table[positions][:, None] for table in rope_tables(rope, P, 256, torch.float32)
    )  # [T, 1, P / 2]
    paired = rope.pairing is RopePairing.INTERLEAVED
    pairs = q_pe.double().unflatten(-1, (P // 2, 2) if paired else (2, P // 2))
    first, second = pairs.unbind(-1 if paired else -2)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1 if paired else -2).flatten(-2)


def rotation(pairing, **changes):
    """Return the launcher of a config with a rope, and the rope."""
    cfg = config(rope=Rope(pairing, theta=100.0), **changes)
    tables = rope_tables(cfg.rope, P, cfg.max_model_len, cfg.dtype)
    return RotateQueries(cfg, "interpreter", tables), cfg.rope


@PAIRINGS
@pytest.mark.parametrize("num_heads", [1, 3, 32, 65])
def test_every_head_is_rotated_by_its_token(pairing, num_heads):
    """S-12: programs that hold several tokens, a part of one, and fewer pairs than they could."""
    rotate, rope = rotation(pairing, num_heads=num_heads)
    q_pe = torch.randn(7, num_heads, P, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 3, 255, 3, 17, 0, 1])
    turned = rotate.launch(q_pe, positions)[:7]
    expected = rotated(q_pe, positions, rope)
    torch.testing.assert_close(turned.double(), expected, rtol=1e-6, atol=1e-7)


def test_lines_past_the_step_are_left_alone():
    """S-9: T tokens are rotated, however many the buffer holds."""
    rotate, _ = rotation(RopePairing.NEOX, num_heads=3)
    rotate.q_pe.fill_(5.0)
    rotate.launch(torch.zeros(2, 3, P), torch.tensor([1, 2]))
    assert (rotate.q_pe[:2] == 0).all()
    assert (rotate.q_pe[2:] == 5).all()


@PAIRINGS
def test_strided_queries(pairing):
    """S-9: gaps between heads and tokens hold NaN and are never used."""
    rotate, _ = rotation(pairing)
    q_pe = torch.randn(5, 4, P, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)
    expected = rotate.launch(q_pe, positions)[:5].clone()
    view = torch.full((10, 6, P + 16), torch.nan)[::2, :4, :P]
    view.copy_(q_pe)
    assert torch.equal(rotate.launch(view, positions)[:5], expected)


@PAIRINGS
def test_half_precision_rounds_once(pairing):
    """S-12: float32 products of float16 queries, rounded to float16 at the end."""
    rotate, rope = rotation(pairing, dtype=torch.float16, cache_format="fp16")
    q_pe = torch.randn(5, 4, P, generator=torch.Generator().manual_seed(0)).half()
    positions = torch.tensor([200, 7, 0, 31, 99])
    turned = rotate.launch(q_pe, positions)[:5]
    assert turned.dtype is torch.float16
    exact = rotated(q_pe, positions, rope)
    assert ((turned.double() - exact).abs() <= 2**-11 * exact.abs() + 2**-20).all()


@PAIRINGS
def test_queries_and_keys_turn_alike(pairing):
    """S-12: a query and a key of the same token and bits are rotated to the same bits."""
    step = build((70, 5), (9, 9), num_heads=1, rope=Rope(pairing))
    mla = PagedMla(step.config, "cpu")
    step.attend(mla)
    mla.append(torch.zeros(14, R), step.q_pe[:, 0], step.cache)
    keys = step.cache.view(-1, R + P)[mla.slot_mapping, R:]
    assert torch.equal(keys, mla._core.rotate.q_pe[:14, 0])


@PAIRINGS
def test_a_step_with_padding_and_a_shared_workspace(pairing):
    """S-9, S-12: padded queries are NaN; what another instance rotates stays its own."""
    rope = Rope(pairing, theta=100.0)
    step = build((40, 3), (0, 2), (17, 1), padded_tokens=2, rope=rope)
    other = build((90, 8), seed=1, rope=rope)
    mla = PagedMla(step.config, "cpu")
    beside = PagedMla(other.config, "cpu", workspace=mla.workspace)
    answer = step.attend(mla)
    expected_beside = other.attend(beside)
    given = step.q_pe
    step.q_pe = rotated(given, mla.positions, rope)
    step.q_nope[3:5] = step.q_pe[3:5] = 0  # of the row without keys
    assert_close(tuple(t[:6] for t in answer), tuple(t[:6] for t in dense(step)))
    assert not answer[0][6:].any()
    again, _ = mla.attend(step.q_nope, given, step.cache)
    assert torch.equal(again[:3], answer[0][:3])
    assert torch.equal(other.attend(beside)[0], expected_beside[0])


def test_the_queries_given_are_not_written():
    """S-9: rotation has a buffer of its own."""
    step = build((40, 3), rope=Rope(RopePairing.NEOX))
    before = step.q_pe.clone()
    step.attend()
    assert torch.equal(step.q_pe, before)


def test_the_buffer_is_there_with_a_rope_alone():
    """S-9: [max_query_tokens, H, P] in the account of memory, or nothing."""
    plain = {buffer.name for buffer in PagedMla(config(), "cpu").memory()}
    mla = PagedMla(config(rope=Rope(RopePairing.NEOX)), "cpu")
    buffers = {buffer.name: buffer.shape for buffer in mla.memory()}
    assert buffers["q_pe"] == (64, 4, P)
    assert set(buffers) == plain | {"q_pe"}


@pytest.mark.parametrize(
    ("arch", "overlaps"),
    [("sm80", False), ("sm89", False), ("sm90", True), ("sm100", True), ("interpreter", False)],
)
def test_overlaps_where_the_device_can(arch, overlaps):
    """Launches overlap from compute capability 9.0 on, and never in the interpreter."""
    spec = rotate_spec(config(rope=Rope(RopePairing.NEOX)), arch)
    assert spec.constants["OVERLAP"] is overlaps
    assert ("launch_pdl" in spec.options) is overlaps
