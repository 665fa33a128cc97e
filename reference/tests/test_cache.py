"""What append writes, byte by byte, and what reading back returns."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from reference_scenes import causal, loops, problem_of, request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append, gather_context, slots_to_write
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.tolerance.caches import Rotated, allowed_bytes
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Rope, RopePairing

EVERY_BLOCK = np.arange(6)


def _empty_cache(problem):
    return CacheImage.without_blocks(problem.layout, np.array([0xAB, 0xCD], np.uint8))


def _two_tokens(**layout):
    """A row of 5 tokens in blocks 4 and 1; its last 2 tokens are this step's."""
    made = scene([request(5, 1, "bfloat16")], [3], dtype="bfloat16")
    table = np.array([[4, 1]], np.int32)
    problem = replace(made.problem, num_blocks=6, **layout)
    return problem, replace(made.batch, block_table=table), _empty_cache(problem)


def test_rows_land_at_their_byte_addresses():
    """S-10, S-11: 12 bytes a token, ckv then k_pe; slots 19 and 4; no other byte changes."""
    problem, batch, image = _two_tokens()
    storage = append(problem, batch, image).read(EVERY_BLOCK).ravel()
    expected = np.tile(image.poison, len(storage) // 2)
    for t, slot in enumerate((19, 4)):
        row = batch.ckv[t].tobytes() + batch.k_pe[t].tobytes()
        expected[12 * slot : 12 * slot + 12] = np.frombuffer(row, np.uint8)
    assert storage.tolist() == expected.tolist()


def test_gaps_keep_their_bytes():
    """S-10: 4 bytes between tokens and 6 after each block are not written."""
    problem, batch, image = _two_tokens(token_padding=4, block_padding=6)
    storage = append(problem, batch, image).read(EVERY_BLOCK).ravel()
    expected = np.tile(image.poison, len(storage) // 2)
    for t, start in enumerate((4 * 70 + 3 * 16, 1 * 70 + 0 * 16)):
        row = batch.ckv[t].tobytes() + batch.k_pe[t].tobytes()
        expected[start : start + 12] = np.frombuffer(row, np.uint8)
    assert storage.tolist() == expected.tolist()


def test_explicit_slots_and_the_one_that_is_none():
    """S-10: the engine's slots are taken as they are; -1 writes nothing."""
    problem, batch, image = _two_tokens()
    after = append(problem, replace(batch, slot_mapping=np.array([-1, 9])), image)
    assert after.block_ids.tolist() == [2]
    cells = after.blocks.reshape(4, 12)
    assert cells[1].tobytes() == batch.ckv[1].tobytes() + batch.k_pe[1].tobytes()
    assert np.unique(cells[[0, 2, 3]]).tolist() == [0xAB, 0xCD]


def test_padding_writes_nothing():
    """S-9, S-10: neither a row of length 0 nor a token past the last row has a slot."""
    problem, batch, image = _two_tokens()
    no_row = replace(batch, seq_lens=np.zeros(1, np.int32))
    no_token = replace(batch, cu_seqlens_q=np.array([0, 0], np.int32))
    for padded in (no_row, no_token):
        assert append(problem, padded, image).block_ids.size == 0


def test_inputs_stay_as_they_were():
    """S-10: neither the image nor the latents are changed, with rotation too."""
    problem, batch, image = _two_tokens(rope=Rope(RopePairing.NEOX))
    image = append(problem, batch, image)
    before = image.blocks.tobytes(), batch.ckv.tobytes(), batch.k_pe.tobytes()
    append(problem, replace(batch, ckv=batch.ckv + batch.ckv), image)
    assert before == (image.blocks.tobytes(), batch.ckv.tobytes(), batch.k_pe.tobytes())


def test_keys_are_cached_rotated():
    """S-12: k_pe of positions 3 and 4 turns once, rounded to the dtype; ckv does not turn."""
    problem, batch, image = _two_tokens(rope=Rope(RopePairing.INTERLEAVED))
    ckv, k_pe = gather_context(problem, batch, append(problem, batch, image))
    assert ckv[3:].tolist() == batch.ckv.tolist()
    for position, cached, given in zip((3, 4), k_pe[3:], batch.k_pe, strict=True):
        turned = complex(*given.tolist()) * np.exp(1j * position)
        expected = np.array([turned.real, turned.imag]).astype(ml_dtypes.bfloat16)
        assert cached.tolist() == expected.tolist()


@pytest.mark.parametrize(("slot", "is_right"), [(19, True), (4, True), (18, False), (5, False)])
def test_a_key_may_be_off_where_it_is_rotated(slot, is_right):
    """S-12: by a last bit in slots 19 and 4, which the step writes; S-10: and in no other."""
    problem, batch, image = _two_tokens(rope=Rope(RopePairing.NEOX))
    expected = append(problem, batch, image).read(EVERY_BLOCK)
    blocks = expected.copy()
    block, token = divmod(slot, problem.block_size)
    problem.layout.field(blocks, "k_pe").view(np.uint16)[block, token, 0] ^= 1
    written = slots_to_write(problem, batch)
    rotated = Rotated.of(problem, written)
    allowed, _ = allowed_bytes(problem.layout, EVERY_BLOCK, blocks, expected, rotated)
    assert allowed.all() == is_right


def test_strided_latents():
    """S-10: latents may be views with gaps."""
    problem, batch, image = _two_tokens()
    wide = np.full((4, 9), np.nan, batch.ckv.dtype)
    wide[::2, :4] = batch.ckv
    strided = replace(batch, ckv=wide[::2, :4])
    expected = append(problem, batch, image).blocks
    assert append(problem, strided, image).blocks.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_append_then_gather_returns_the_tokens(dtype):
    """S-11: a plain format keeps every bit of every token."""
    one = request(7, 3, dtype)
    made = scene([one], [0], dtype=dtype)
    image = append(made.problem, made.batch, _empty_cache(made.problem))
    ckv, k_pe = gather_context(made.problem, made.batch, image)
    assert ckv.tobytes() == one.ckv.tobytes()
    assert k_pe.tobytes() == one.k_pe.tobytes()


def test_gather_returns_rows_in_order_and_skips_empty_ones():
    """S-9: each row in order has seq_len tokens, and nothing past them is read."""
    first, second = request(5, 1), request(6, 2)
    made = scene([first, request(0, 9), second], [4, 0, 1])
    ckv, k_pe = gather_context(made.problem, made.batch, made.image)
    assert ckv.tolist() == first.ckv.tolist() + second.ckv.tolist()
    assert k_pe.tolist() == first.k_pe.tolist() + second.k_pe.tolist()


def test_appended_tokens_are_attended():
    """S-10, S-5: what append wrote is what attention reads."""
    one = request(6, 4)
    made = scene([one], [0])
    image = append(made.problem, made.batch, _empty_cache(made.problem))
    answer = attend(made.problem, made.batch, image, Rounding.EXACT)
    np.testing.assert_allclose(answer.out, loops(one, range(6), causal)[0], rtol=1e-10)


def test_a_block_at_the_far_end_of_a_huge_cache():
    """S-1, S-10: 2^26 blocks of 256 tokens cost nothing and do not wrap."""
    problem = problem_of(num_blocks=2**26, block_size=256)
    made = scene([request(2, 1)], [1])
    batch = replace(made.batch, block_table=np.array([[2**26 - 1]], np.int32))
    after = append(problem, batch, _empty_cache(problem))
    assert after.block_ids.tolist() == [2**26 - 1]
    assert after.layout.rows(after.blocks)[0, 1, :16].tobytes() == batch.ckv[0].tobytes()


@pytest.mark.parametrize(
    ("name", "token_bytes"), [("bf16", 1152), ("fp16", 1152), ("fp32", 2304), ("fp8_ds_mla", 656)]
)
def test_bytes_of_a_token(name, token_bytes):
    """S-11: a format states its size; at R = 512 and P = 64."""
    dims = replace(problem_of().dims, kv_lora_rank=512, qk_rope_head_dim=64)
    assert FORMATS[name].token_bytes(dims) == token_bytes
    assert all(numpy_dtype(field.dtype) for field in FORMATS[name].fields(dims))
