"""Queries of 8 bits: codes and scales by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import DIMS, request, scene

from paged_mla_reference.oracle import ReferenceRunner
from paged_mla_reference.rules.fp8 import SMALLEST_SCALE, quantize, scale_of
from paged_mla_reference.rules.queries import quantize_queries
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_reference.tolerance.queries import check_queries
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing

F32 = np.float32
DTYPES = ("float32", "float16", "bfloat16")


def asked(*lines, dtype="float32", **changes):
    """Return a problem, and a step of its third token; a line is a head's 4 and 2 numbers."""
    made = scene([request(3, 0, dtype)], [2], dtype=dtype)
    q = np.array([lines], F32).astype(numpy_dtype(dtype))
    step = replace(made.batch, q_nope=q[..., :4], q_pe=q[..., 4:])
    return replace(made.problem, **changes), step


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_a_scale_of_both_parts(dtype):
    """S-11: 448 / 448 and 7 / 448; the largest of a head is code 0x7e, half of it 0x76."""
    codes, scales = quantize_queries(
        *asked([1, 2, 4, 224, 448, -448], [7, -3.5, 0, 1.75, 3.5, -0.0], dtype=dtype)
    )
    assert scales.tolist() == [[1.0, 0.015625]]
    assert (codes.dtype, scales.dtype) == (np.uint8, F32)
    assert codes.tolist() == [
        [[0x38, 0x40, 0x48, 0x76, 0x7E, 0xFE], [0x7E, 0xF6, 0x00, 0x6E, 0x76, 0x80]]
    ]


def test_a_given_scale_divides_all_and_is_handed_back():
    """S-11: 3 / 0.5 is 6; past 448 x 0.5 it is 224."""
    codes, scales = quantize_queries(*asked([3, -3, 0, 225, -1e30, 0.5], [0.5] * 6), 0.5)
    assert scales.tolist() == [[0.5, 0.5]]
    assert codes[0, 0].tolist() == [0x4C, 0xCC, 0x00, 0x7E, 0xFE, 0x38]


@pytest.mark.parametrize(("scale", "zero"), [(None, SMALLEST_SCALE), (2.0, F32(2.0))])
def test_infinities_and_nan_become_nan(scale, zero):
    """S-11: infinities and NaN of both signs become 0x7f and are ignored in scales."""
    odd = [np.inf, -np.inf, np.nan, 448.0, -np.nan, 0.0]
    codes, scales = quantize_queries(*asked(odd, [0.0] * 6), scale)
    right = quantize(np.array([448.0, 0.0], F32), scales[0, 0]).tolist()
    assert codes[0, 0].tolist() == [0x7F, 0x7F, 0x7F, right[0], 0x7F, right[1]]
    assert scales[0].tolist() == [1.0 if scale is None else 2.0, zero]
    assert not codes[0, 1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.03])
def test_queries_are_rotated_and_rounded_first(dtype, scale):
    """S-12: at the token's position, 2, to the problem's type; latent parts stay."""
    rope = Rope(RopePairing.NEOX)
    lines = [1, 2, 4, 8, 3.3, -2.7], [1, 1, 1, 1, 90, 70]
    problem, batch = asked(*lines, dtype=dtype, rope=rope)
    turned = round_to(rotate(widen(batch.q_pe), np.array([2]), rope), dtype)
    unrotated = replace(problem, rope=None), replace(batch, q_pe=turned)
    for mine, theirs in zip(
        quantize_queries(problem, batch, scale), quantize_queries(*unrotated, scale), strict=True
    ):
        assert mine.tobytes() == theirs.tobytes()
    codes, _ = quantize_queries(replace(problem, rope=None), batch, scale)
    assert codes[..., 4:].tolist() != quantize_queries(problem, batch, scale)[0][..., 4:].tolist()


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan, 1e-60])
def test_a_scale_that_divides_nothing_is_refused(scale):
    """S-11: a given scale is a finite float32 > 0."""
    problem, batch = asked([1] * 6, [1] * 6)
    with pytest.raises(InvalidArgument, match="scale"):
        ReferenceRunner(problem).quantize_queries(batch, scale)


def test_the_backend_quantizes_every_token():
    """S-11: [T, H, R + P] and [T, H]."""
    problem, batch = asked([1] * 6, [2] * 6)
    codes, scales = ReferenceRunner(problem).quantize_queries(batch, None)
    assert codes.shape == (1, DIMS.num_heads, 6)
    assert scales.tolist() == [[F32(1) / F32(448), F32(2) / F32(448)]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("line", "ulps", "is_right"),
    [
        ([1, 2, 3, 0.7, 5, 0], 1, True),
        ([1, 2, 3, 0.7, 5, 0], 3, False),
        ([5, 2, 3, 0, 1, 0], 1, False),
    ],
    ids=["rotated", "rotated-3-ulps", "not-rotated"],
)
def test_a_scale_may_be_that_of_a_neighbour_where_the_largest_is_rotated(
    dtype, line, ulps, is_right
):
    """S-12: what 5 and 0 are rotated to may be an ulp more: another scale, and codes of that."""
    problem, step = asked(line, line, dtype=dtype, rope=Rope(RopePairing.INTERLEAVED))
    right = quantize_queries(problem, step)
    turned = round_to(rotate(widen(step.q_pe), np.array([2]), problem.rope), dtype)
    x = np.concatenate([step.q_nope, turned], axis=-1)  # [1, 2, R + P]
    largest = np.s_[..., np.abs(widen(x[0, 0])).argmax()]
    for _ in range(ulps):
        x[largest] = np.nextafter(x[largest], np.array(np.inf, x.dtype) * np.sign(x[largest]))
    scales = scale_of(x.astype(F32))
    answer = quantize(x.astype(F32), scales[..., None]), scales
    if is_right:
        check_queries(problem, step, answer, right, given=None)
        with pytest.raises(Mismatch, match="codes of queries"):
            check_queries(problem, step, (answer[0] ^ 3, scales), right, given=None)
    else:
        with pytest.raises(Mismatch, match="scales of queries"):
            check_queries(problem, step, answer, right, given=None)


def test_a_given_scale_has_no_neighbour():
    """S-11: not where a rotated number is larger than it holds, either."""
    sizes = [1, 2, 3, 0.7, 500, 0]
    problem, step = asked(sizes, sizes, dtype="bfloat16", rope=Rope(RopePairing.INTERLEAVED))
    codes, scales = right = quantize_queries(problem, step, 0.5)
    check_queries(problem, step, right, right, given=0.5)
    moved = codes, scales * F32(1 + 2**-9)
    with pytest.raises(Mismatch, match="scales of queries"):
        check_queries(problem, step, moved, right, given=0.5)
