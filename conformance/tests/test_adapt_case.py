"""A kernel for some head counts and block sizes runs nearly all cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged_mla_conformance.runners.profile import load_profile
from paged_mla_conformance.suite.selection.adapt_case import adapt_case, adapt_scenario, nearest_of
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS, Run
from paged_mla_conformance.suite.selection.params import (
    CaseParam,
    params_of_group,
    trace_params,
    why_skip,
    why_skip_trace,
)
from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.simulator.scenarios import CORE
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.cases import GROUPS

TENSOR_CORES = replace(CAPABILITIES, num_heads=frozenset({16, 32, 64, 128}))
ONE_BLOCK_SIZE = replace(TENSOR_CORES, block_sizes=frozenset({64}))


def run_of(capabilities: Capabilities) -> Run:
    backend = ReferenceBackend(capabilities=capabilities)
    return Run(backend, "x:y", "small", load_profile("kernel"), ("float32",))


def asked(capabilities: Capabilities) -> int:
    """Return how many cases and traces run on a backend."""
    run = run_of(capabilities)
    params = [param for group in GROUPS for param in params_of_group(run, group)]
    traces = [why_skip_trace(run, param) is None for param in trace_params(run)]
    return sum(why_skip(run, param, ("attend",)) is None for param in params) + sum(traces)


def test_a_kernel_for_few_head_counts_runs_nine_tenths_of_the_cases():
    """A head count that a case does not fix excludes no case."""
    assert asked(TENSOR_CORES) >= 0.9 * asked(CAPABILITIES)


@pytest.mark.parametrize("group", [group for group in SUITE_GROUPS if group in GROUPS])
def test_no_group_is_lost_to_a_head_count(group: str):
    """Each group has cases for a kernel with one block size and four head counts."""
    run = run_of(ONE_BLOCK_SIZE)
    assert any(why_skip(run, param, ("attend",)) is None for param in params_of_group(run, group))


def test_values_that_a_case_fixes_are_not_changed():
    """S-5: a case that fixes nine heads does not run with sixteen."""
    nine = next(case for case in GROUPS["decode"] if case.name == "h9")
    assert adapt_case(nine, TENSOR_CORES) == (nine, "")


def test_a_kernel_with_a_fixed_scale_runs_every_case_with_it():
    """S-5: the kernel has no parameter for the scale, and the oracle uses the kernel's scale."""
    own = replace(CAPABILITIES, softmax_scale=0.25)
    run = run_of(own)
    for group in GROUPS:
        for param in params_of_group(run, group):
            assert param.case.problem(run.dims, "float32").softmax_scale == 0.25
    schedules = len(trace_params(run))  # they have the model's scale
    assert asked(CAPABILITIES) - schedules <= asked(own) < asked(CAPABILITIES)


def test_a_case_with_another_scale_does_not_run():
    """S-5: the reason names the scale."""
    own = replace(CAPABILITIES, softmax_scale=0.25)
    case = next(case for case in GROUPS["decode"] if case.softmax_scale is None)
    skip = why_skip(run_of(own), CaseParam(case, "float32"), ("attend",))
    assert skip is not None
    assert "softmax_scale" in skip.reason


@pytest.mark.parametrize("size", [1, 2, 3, 8, 48, 256])
def test_an_adapted_schedule_can_run(size: int):
    """S-19: with every block size, every request fits into the cache."""
    capabilities = replace(CAPABILITIES, block_sizes=frozenset({size}))
    for scenario in CORE:
        adapted, _ = adapt_scenario(scenario, capabilities)
        assert adapted.config.block_size == size
        assert all(adapted.config.longest >= len(request.tokens) for request in adapted.requests)


def test_an_adapted_case_has_a_note():
    """The report names the changes."""
    case = next(case for case in GROUPS["layouts"] if case.name == "block-padding")
    adapted, note = adapt_case(case, TENSOR_CORES)
    assert (adapted.num_heads, adapted.id, note) == (16, case.id, "num_heads 16, not 6")
    schedule, note = adapt_scenario(CORE[0], ONE_BLOCK_SIZE)
    assert (schedule.config.block_size, note) == (64, "block_size 64, not 16")


@pytest.mark.parametrize(
    ("declared", "asked_for", "taken"), [((16, 32), 24, 32), ((16, 32), 20, 16), ((), 5, 5)]
)
def test_the_nearest_value_is_chosen(declared: tuple[int, ...], asked_for: int, taken: int):
    """The larger of two equally near values is chosen; without values, nothing changes."""
    assert nearest_of(declared, asked_for) == taken
