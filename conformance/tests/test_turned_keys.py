"""Rotated keys may be rounded to their other neighbor in every cache format (S-12)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from turned import turned

from paged_mla_conformance.suite.trials.layered import check_layer, check_layer_bits
from paged_mla_conformance.suite.trials.traces import TraceTrial
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.backend import ReferenceBackend
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.cache import append, slots_to_write
from paged_mla_reference.rules.e4m3 import decode
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.queries import quantize_queries
from paged_mla_reference.rules.rounding import widen
from paged_mla_reference.simulator.scenarios import core_scenario
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_reference.tolerance.queries import check_queries
from paged_mla_shared.cases import GROUPS, QUERIES, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem
from paged_mla_shared.query_inputs import build_queries

FORMATS = (None, "fp8_e4m3", "fp8_ds_mla", "fp8_block_token", "fp8_block_group")
CASES = [case for case in GROUPS["formats"] if case.name in {"rope-neox", "rope-interleaved-yarn"}]


def turning(element: int, ulps: int = 1) -> Oracle:
    """Return an oracle that rounds an element of each rotated key away from its nearest number."""

    def other(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        assert problem.rope is not None
        written = slots_to_write(problem, batch) >= 0
        positions = metadata(problem, batch).positions[written]
        keys, others = turned(batch.k_pe[written], positions, problem.rope, problem.dtype, ulps)
        keys[:, element] = others[:, element]
        k_pe = batch.k_pe.copy()
        k_pe[written] = keys
        return append(replace(problem, rope=None), replace(batch, k_pe=k_pe), image)

    return replace(RIGHT, append=other)


def trial(case: Case, dtype: str, oracle: Oracle) -> Trial:
    """Return a trial of an oracle on a case whose largest numbers are rotated numbers."""
    case = replace(case, latent_scale=1.0, key_scale=4.0, query_scale=0.5)
    return Trial(ReferenceBackend(oracle=oracle), case, SMALL, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_keys_of_a_right_backend_may_have_another_rounding(
    case: Case, cache_format: str | None, dtype: str
):
    """S-10, S-12: one element of each key is rounded differently; scales and codes may follow."""
    for element in range(SMALL.qk_rope_head_dim):
        asked = replace(case, cache_format=cache_format)
        trial(asked, dtype, turning(element)).check_step()
        trial(asked, dtype, turning(element)).check_append_again()


@pytest.mark.parametrize("cache_format", FORMATS[:-1])  # tokens of a group have no dense output
@pytest.mark.parametrize("scenario", ["chunks", "trees"])
def test_schedules_too(scenario: str, cache_format: str | None):
    """S-19: keys of one step are read by other steps."""
    asked = replace(core_scenario(scenario), cache_format=cache_format)
    for element in (0, SMALL.qk_rope_head_dim - 1):
        backend = ReferenceBackend(oracle=turning(element))
        assert TraceTrial(backend, asked, SMALL, "bfloat16").check() > 8


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("name", ["rope-neox", "rope-interleaved-yarn"])
def test_layers_too(name: str, cache_format: str | None):
    """S-21: layers run in both forms, in parts and in chunks."""
    [case] = [case for case in GROUPS["layer"] if case.name == name]
    case = replace(case, cache_format=cache_format, key_scale=4.0)
    for element in (0, SMALL.qk_rope_head_dim - 1):
        backend = ReferenceBackend(oracle=turning(element))
        check_layer(Trial(backend, case, SMALL, "bfloat16"))
        check_layer_bits(Trial(backend, case, SMALL, "bfloat16"))


def one_down(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
    """Append, and store each rotated number one step nearer to zero."""
    after, layout = append(problem, batch, image), problem.layout
    slots = slots_to_write(problem, batch)
    written = np.isin(layout.slots(after.block_ids), slots[slots >= 0])
    blocks = after.blocks.copy()
    k_pe = layout.field(blocks, "k_pe")
    numbers = k_pe.view(f"u{k_pe.itemsize}")
    numbers -= written[..., None] & (widen(k_pe) != 0) & np.isfinite(widen(k_pe))
    return replace(after, blocks=blocks)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_keys_one_step_down_are_wrong(case: Case, cache_format: str | None, dtype: str):
    """S-12: only few rotated numbers are near the middle of two numbers."""
    asked = replace(case, cache_format=cache_format)
    with pytest.raises(Mismatch, match="cache"):
        trial(asked, dtype, replace(RIGHT, append=one_down)).check_append()


@pytest.mark.parametrize("name", ["rope-neox", "rope-interleaved-yarn"])
def test_all_queries_one_step_down_are_wrong(name: str):
    """S-11, S-12: only few rotated queries are near the middle of two numbers."""
    [case] = [case for case in QUERIES if case.name == name]
    rank = SMALL.kv_lora_rank

    def down(
        problem: Problem, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        codes, scales = quantize_queries(problem, batch, scale)
        codes[..., rank:] -= (codes[..., rank:] & 0x7F != 0).astype(np.uint8)
        return codes, scales

    backend = ReferenceBackend(oracle=replace(RIGHT, quantize_queries=down))
    with pytest.raises(Mismatch, match="codes of queries"):
        Trial(backend, case, SMALL, "bfloat16").check_queries()


def test_a_query_with_a_nan_may_have_another_rounding():
    """S-11, S-12: NaN has its own code and does not change the budgets of other elements."""
    [case] = [case for case in QUERIES if case.name == "rope-neox"]
    problem = case.problem(SMALL, "bfloat16")
    batch = build_queries(case, SMALL, "bfloat16")[0]
    q_pe = batch.q_pe.copy()
    q_pe[0, 0, 0] = np.nan  # the other element of its pair becomes NaN too
    batch = replace(batch, q_pe=q_pe)
    right = quantize_queries(problem, batch, 1.0)
    codes, scales = right[0].copy(), right[1]
    codes[0, 0, SMALL.kv_lora_rank + 1] += 1
    assert np.isfinite(decode(codes[0, 0, SMALL.kv_lora_rank + 1]))
    check_queries(problem, batch, (codes, scales), right, given=1.0)
    codes[0, 0, SMALL.kv_lora_rank] = 0
    with pytest.raises(Mismatch, match="codes of queries"):
        check_queries(problem, batch, (codes, scales), right, given=1.0)


@pytest.mark.parametrize("cache_format", ["fp8_block_token", "fp8_block_group"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_four_ulps_are_wrong(case: Case, cache_format: str):
    """S-11: an error of a scale that is larger than a rounding is wrong."""

    def is_killed(element: int) -> bool:
        asked = replace(case, cache_format=cache_format)
        try:
            trial(asked, "bfloat16", turning(element, 4)).check_append()
        except Mismatch as mismatch:
            return "of its scales" in str(mismatch) or "of its row" in str(mismatch)
        return False

    assert any(map(is_killed, range(SMALL.qk_rope_head_dim)))
