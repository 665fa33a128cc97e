"""The cache formats of 8 bits: codes and scales by hand, and by loops over single numbers."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from reference_scenes import DIMS, problem_of, request, scene

from paged_mla_reference.backend import create
from paged_mla_reference.rules.cache import copy_slots, gather_context, read_slots, write_slots
from paged_mla_reference.rules.encoding import ENCODINGS, as_cached
from paged_mla_reference.rules.fp8 import FP8, SMALLEST_SCALE, quantize, scale_of
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.rules.validation.inputs import validate_problem
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.poison import poisoned_image

F32 = np.float32
TINY = float(SMALLEST_SCALE)


def image_of(cache_format, **more):
    """Return blocks 0 and 1 of 8 slots, of 4 latents and 2 rotated elements, all poison."""
    layout = problem_of(cache_format=cache_format, block_size=8, **more).layout
    return poisoned_image(layout, np.array([0, 1]))


def codes_at(image, slot):
    """Return the codes of one token, latent and key."""
    block, token = divmod(slot, image.layout.block_size)
    parts = (image.layout.field(image.blocks, name)[block, token] for name in ("ckv", "k_pe"))
    return [code for part in parts for code in part.view(np.uint8).tolist()]


def tokens(*rows):
    """Return latents and keys of tokens of 6 numbers each."""
    whole = np.array(rows, F32)
    return whole[:, :4], whole[:, 4:]


def even(x):
    """Return the code of a number within range, by ml_dtypes."""
    return int(np.array(x, F32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_every_format_has_an_encoding():
    """S-11: what is declared is implemented."""
    assert ENCODINGS.keys() == FORMATS.keys()


def test_the_flat_format_by_hand():
    """S-11: 3 / 0.5 is 6; the key is divided too; past 448 x 0.5 it is 224."""
    image = write_slots(
        image_of("fp8_e4m3", cache_scale=0.5),
        np.array([9]),
        *tokens([3.0, -3.0, 0.0, 1000.0, 0.5, -np.inf]),
    )
    assert codes_at(image, 9) == [0x4C, 0xCC, 0x00, 0x7E, 0x38, 0xFE]
    ckv, k_pe = read_slots(image, np.array([9]))
    assert [ckv.tolist(), k_pe.tolist()] == [[[3.0, -3.0, 0.0, 224.0]], [[0.5, -224.0]]]


@pytest.mark.parametrize("scale", [0.03, 1.0, 7.0])
def test_the_flat_format_divides_in_float32(scale):
    """S-11: one rounded division by the scale in float32, then one rounding to e4m3."""
    one = request(300, 3)
    image = write_slots(
        image_of("fp8_e4m3", cache_scale=scale), np.arange(8), one.ckv[:8], one.k_pe[:8]
    )
    for slot in range(8):
        found = [even(F32(x) / F32(scale)) for x in (*one.ckv[slot], *one.k_pe[slot])]
        assert codes_at(image, slot) == found
    ckv, _ = read_slots(image, np.arange(8))
    stored = image.layout.field(image.blocks, "ckv")[0].astype(np.float64)
    assert ckv.tolist() == (stored * float(F32(scale))).tolist()


def test_scales_from_the_data_by_hand():
    """S-11: the largest finite magnitude over 448; nothing, or next to nothing, gives 2^-126."""
    lines = np.array([[1.0, -896.0], [np.inf, 448.0], [np.nan, 44.8], [0, 0], [1e-38, 0]], F32)
    expected = [2.0, 1.0, F32(44.8) / F32(448), TINY, TINY]
    assert scale_of(lines).tolist() == expected
    assert quantize(lines[1:3], scale_of(lines[1:3])[:, None]).tolist() == [
        [0x7E, 0x7E],
        [0x7F, 0x7E],
    ]


def test_the_scale_of_a_token_by_hand():
    """S-11: of latent and key together, at the token's place in the scale tensor."""
    image = write_slots(
        image_of("fp8_block_token"),
        np.array([10, 3]),
        *tokens([1.0, 2.0, 0.0, -0.5, 896.0, 0.0], [0, 0, 0, 0, 0, -0.0]),
    )
    assert image.layout.scales(image.blocks)[1, 2] == 2.0
    assert image.layout.scales(image.blocks)[0, 3] == TINY
    assert codes_at(image, 10) == [0x30, 0x38, 0x00, 0xA8, 0x7E, 0x00]
    assert codes_at(image, 3) == [0, 0, 0, 0, 0, 0x80]
    assert read_slots(image, np.array([10]))[0].tolist() == [[1.0, 2.0, 0.0, -0.5]]


def test_each_quarter_of_a_latent_has_a_scale_in_the_row():
    """S-11: of ds_mla; the key stays bfloat16."""
    image = write_slots(
        image_of("fp8_ds_mla"), np.array([0]), *tokens([448.0, 896.0, -4.48, 0.0, 1.0, 1 / 3])
    )
    scales = image.layout.field(image.blocks, "ckv_scale")[0, 0]
    assert scales.tolist() == [1.0, 2.0, F32(4.48) / F32(448), TINY]
    assert image.layout.field(image.blocks, "ckv")[0, 0].view(np.uint8).tolist() == [
        0x7E,
        0x7E,
        0xFE,
        0x00,
    ]
    assert image.layout.field(image.blocks, "k_pe")[0, 0].astype(F32).tolist() == [1.0, 0.333984375]


def test_keys_in_bfloat16():
    """S-11: bits of bfloat16 are copied; NaN of other types become 0x7fff."""
    layout = image_of("fp8_ds_mla").layout
    odd = np.array([[0xFF81, 0x8000]], np.uint16).view(ml_dtypes.bfloat16)
    ckv = np.zeros((1, 4), F32)
    assert as_cached(layout, ckv.astype(odd.dtype), odd)[1].tobytes() == odd.tobytes()
    found = as_cached(layout, ckv, np.array([[-np.nan, -np.inf]], F32))[1]
    assert found.view(np.uint16).tolist() == [[0x7FFF, 0xFF80]]


@pytest.mark.parametrize("power", [-3, 0, 5])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_block_token", "fp8_block_group"])
def test_readers_take_any_scale(cache_format, power):
    """S-11: the value is the code times the scale, powers of two and others."""
    image = write_slots(image_of(cache_format), np.arange(8), *tokens(*np.ones((8, 6))))
    layout = image.layout
    scales = layout.scales(image.blocks)[:1]
    if not scales.size:
        scales = layout.field(image.blocks, "ckv_scale")[:1]
    for scale in (F32(2.0**power), F32(0.0123)):
        scales[...] = scale
        assert (read_slots(image, np.arange(8))[0] == 448 * float(scale)).all()


class TestGroups:
    """One scale for the two tokens of slots 2g and 2g + 1."""

    SMALL = tokens([448.0, 28.0, 0, 0, -14.0, 1.0])  # scale 1
    LARGE = tokens([0, 0, 1344.0, 0, 0, 3.0])  # scale 3

    def scale(self, image, slot):
        """Return the scale of a slot's group."""
        block, token = divmod(slot, 8)
        return float(image.layout.scales(image.blocks)[block, token // 2])

    def start(self):
        """Return a cache whose slot 4 holds the small token."""
        return write_slots(image_of("fp8_block_group"), np.array([4]), *self.SMALL)

    def test_the_first_token_of_a_group(self):
        """S-11: earlier contents of the group are ignored."""
        image = self.start()
        assert self.scale(image, 4) == 1.0
        assert codes_at(image, 4) == [0x7E, 0x5E, 0, 0, 0xD6, 0x38]
        again = write_slots(image, np.array([4]), *(x / F32(8) for x in self.SMALL))
        assert self.scale(again, 4) == 0.125

    def test_a_smaller_token_takes_the_groups_scale(self):
        """S-11: and no byte of the kept one changes."""
        image = self.start()
        after = write_slots(image, np.array([5]), *(x / F32(8) for x in self.SMALL))
        assert self.scale(after, 5) == 1.0
        assert codes_at(after, 4) == codes_at(image, 4)
        assert codes_at(after, 5)[:2] == [even(56), even(3.5)]

    def test_a_larger_token_requantizes_the_kept_one(self):
        """S-11: e4m3((code x 1) / 3), in float32."""
        after = write_slots(self.start(), np.array([5]), *self.LARGE)
        assert self.scale(after, 5) == 3.0
        expected = [F32(x) / F32(3) for x in (448, 28, 0, 0, -14, 1)]
        assert codes_at(after, 4) == [even(x) for x in expected]
        assert codes_at(after, 5) == [0, 0, 0x7E, 0, 0, 0x38]

    def test_other_groups_and_blocks_stay(self):
        """S-10: byte for byte."""
        image = write_slots(self.start(), np.array([12]), *self.SMALL)
        after = write_slots(image, np.array([5]), *self.LARGE)
        changed = np.argwhere(image.blocks != after.blocks)
        assert set(changed[:, 0].tolist()) == {0}
        rows = image.layout.rows(image.blocks) != image.layout.rows(after.blocks)
        assert np.unique(np.argwhere(rows)[:, 1]).tolist() == [4, 5]
        scales = image.layout.scale_bytes(image.blocks) != image.layout.scale_bytes(after.blocks)
        assert np.unique(np.argwhere(scales)[:, 1]).tolist() == [2]

    def test_tokens_written_together_share_the_larger_scale(self):
        """S-11: in any order of the tokens, rounded once."""
        both = [np.concatenate(pair) for pair in zip(self.SMALL, self.LARGE, strict=True)]
        forth = write_slots(image_of("fp8_block_group"), np.array([4, 5]), *both)
        back = write_slots(image_of("fp8_block_group"), np.array([5, 4]), *(x[::-1] for x in both))
        assert self.scale(forth, 4) == 3.0
        assert forth.blocks.tobytes() == back.blocks.tobytes()
        assert codes_at(forth, 4)[0] == even(F32(448) / F32(3))

    def test_drafts_written_again_keep_the_tokens_before_them(self):
        """S-11: a group's scale never shrinks while a token of it is kept."""
        image = write_slots(self.start(), np.array([5]), *self.LARGE)
        again = write_slots(image, np.array([5]), *self.SMALL)
        assert self.scale(again, 5) == 3.0
        assert codes_at(again, 4) == codes_at(image, 4)
        assert codes_at(again, 5) == [even(F32(x) / F32(3)) for x in (448, 28, 0, 0, -14, 1)]

    @pytest.mark.parametrize("old", [np.nan, np.inf, 0.0, -1.0])
    def test_a_scale_that_is_none_keeps_nothing(self, old):
        """S-9: the slots below were never written."""
        image = self.start()
        image.layout.scales(image.blocks)[0, 2] = old
        after = write_slots(image, np.array([5]), *self.LARGE)
        assert self.scale(after, 5) == 3.0
        assert codes_at(after, 4) == codes_at(image, 4)

    def test_blocks_are_copied_without_another_rounding(self):
        """S-15: codes and scales are those of the source."""
        image = write_slots(self.start(), np.array([5]), *self.LARGE)
        copied = copy_slots(image, np.arange(4, 6), np.arange(14, 16))
        assert codes_at(copied, 14) == codes_at(image, 4)
        assert self.scale(copied, 14) == self.scale(image, 4)


@pytest.mark.parametrize("cache_format", FP8)
def test_nothing_written_changes_nothing(cache_format):
    """S-10: an idle step; and nothing is read."""
    image, none = image_of(cache_format), np.zeros(0, np.int64)
    after = write_slots(image, none, np.zeros((0, 4), F32), np.zeros((0, 2), F32))
    assert after.blocks.tobytes() == image.blocks.tobytes()
    assert [x.shape for x in read_slots(after, none)] == [(0, 4), (0, 2)]


@pytest.mark.parametrize("cache_format", FP8)
def test_a_token_is_near_what_it_was(cache_format):
    """S-11: within half a step of e4m3, 2^-4 of a normal number."""
    one = request(50, 8)
    layout = problem_of(cache_format=cache_format, block_size=8, cache_scale=0.01).layout
    ckv, k_pe = as_cached(layout, one.ckv, one.k_pe)
    for found, given in ((ckv, one.ckv), (k_pe, one.k_pe)):
        error = np.abs(widen(found) - given)
        assert (error <= np.abs(given) / 16 + 0.01 * 2.0**-10).all()
        assert error.max() > 0


def test_gathered_values_are_rounded_to_float32_first():
    """S-11: 1.125 x scale is just off a tie of bfloat16, and on it in float32."""
    made = scene([request(1, 1)], [1])
    first = {"seq_lens": np.array([1], np.int32), "block_table": np.array([[0]], np.int32)}
    batch = replace(made.batch, **first)
    rounded_once = []
    for tie in 1 + (2 * np.arange(8) + 1) * 2.0**-8:
        scale = F32(tie / 1.125)
        problem = problem_of(
            dtype="bfloat16", cache_format="fp8_e4m3", block_size=8, cache_scale=float(scale)
        )
        image = poisoned_image(problem.layout, np.array([0]))
        image.layout.rows(image.blocks)[...] = even(1.125)
        found = gather_context(problem, batch, image)[0][0, 0]
        assert found == (F32(1.125) * scale).astype(ml_dtypes.bfloat16)
        rounded_once.append(found == round_to(np.array(1.125 * float(scale)), "bfloat16"))
    assert not all(rounded_once)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("block_size", {"cache_format": "fp8_block_group", "block_size": 6}),
        ("block_size", {"cache_format": "fp8_block_group", "block_size": 1}),
        ("kv_lora_rank", {"cache_format": "fp8_ds_mla", "dims": replace(DIMS, kv_lora_rank=6)}),
    ],
)
def test_sizes_that_scales_do_not_divide(argument, changes):
    """S-11: groups of a block are equal, shares of a latent too."""
    with pytest.raises(InvalidArgument, match=f"{argument}: got .*multiples of 4"):
        validate_problem(problem_of(**changes))


@pytest.mark.parametrize("cache_format", FP8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_step_of_the_backend(cache_format, dtype):
    """S-5, S-10, S-11: its output is near the output of a plain cache."""
    answers = []
    for stored in (cache_format, {"bfloat16": "bf16", "float16": "fp16"}.get(dtype, "fp32")):
        dims = replace(DIMS, kv_lora_rank=16, qk_rope_head_dim=8)
        runner = create().prepare(
            problem_of(dims=dims, dtype=dtype, cache_format=stored, cache_scale=0.02)
        )
        made = scene([request(7, 1)], [0])
        one = request(7, 1, dtype, dims)
        batch = replace(made.batch, **vars(one))
        runner.append(batch)
        answers.append(runner.attend(batch).out.astype(F32))
        assert runner.gather_context(batch)[0].dtype == one.ckv.dtype
    assert 0 < np.abs(answers[0] - answers[1]).max() < 0.3
