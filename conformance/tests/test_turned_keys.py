"""Rotated keys may be rounded to their other neighbour, whatever the cache makes of them (S-12)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from turned import turned

from paged_mla_conformance.layered import check_layer, check_layer_bits
from paged_mla_conformance.traces import TraceTrial
from paged_mla_conformance.trial import Trial
from paged_mla_reference.backend import ReferenceBackend
from paged_mla_reference.cache import append, slots_to_write
from paged_mla_reference.judging.compare import Mismatch
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.positions import metadata
from paged_mla_reference.simulator.scenarios import core_scenario
from paged_mla_shared.cases import GROUPS, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem

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
    """Return a case whose largest numbers are rotated ones, put to an oracle."""
    case = replace(case, latent_scale=1.0, key_scale=4.0, query_scale=0.5)
    return Trial(ReferenceBackend(oracle=oracle), case, SMALL, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_keys_of_a_right_backend_may_be_rounded_otherwise(
    case: Case, cache_format: str | None, dtype: str
):
    """S-10, S-12: any one element of each; then scales and codes are others, and answers follow."""
    for element in range(SMALL.qk_rope_head_dim):
        asked = replace(case, cache_format=cache_format)
        trial(asked, dtype, turning(element)).check_step()


@pytest.mark.parametrize("cache_format", FORMATS[:-1])  # tokens of a group have no dense answer
@pytest.mark.parametrize("scenario", ["chunks", "trees"])
def test_schedules_too(scenario: str, cache_format: str | None):
    """S-19: whatever is cached by one step and read by others."""
    asked = replace(core_scenario(scenario), cache_format=cache_format)
    for element in range(SMALL.qk_rope_head_dim):
        backend = ReferenceBackend(oracle=turning(element))
        assert TraceTrial(backend, asked, SMALL, "bfloat16").check() > 8


@pytest.mark.parametrize("cache_format", FORMATS)
@pytest.mark.parametrize("name", ["rope-neox", "rope-interleaved-yarn"])
def test_layers_too(name: str, cache_format: str | None):
    """S-21: in both forms, in parts and in chunks."""
    [case] = [case for case in GROUPS["layer"] if case.name == name]
    case = replace(case, cache_format=cache_format, key_scale=4.0)
    for element in range(SMALL.qk_rope_head_dim):
        backend = ReferenceBackend(oracle=turning(element))
        check_layer(Trial(backend, case, SMALL, "bfloat16"))
        check_layer_bits(Trial(backend, case, SMALL, "bfloat16"))


@pytest.mark.parametrize("cache_format", ["fp8_block_token", "fp8_block_group"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_four_ulps_are_no_rounding(case: Case, cache_format: str):
    """S-11: a scale further off than a rounding is wrong."""

    def is_killed(element: int) -> bool:
        asked = replace(case, cache_format=cache_format)
        try:
            trial(asked, "bfloat16", turning(element, 4)).check_append()
        except Mismatch as mismatch:
            return "of its scales" in str(mismatch) or "of its row" in str(mismatch)
        return False

    assert any(map(is_killed, range(SMALL.qk_rope_head_dim)))
