"""The cases that are parameters of a test, and the reasons why some of them do not run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

from paged_mla_conformance.runners.profile import Profile
from paged_mla_conformance.suite.selection.adapt_case import adapt_case, adapt_scenario
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS, Run
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.scenarios import CORE
from paged_mla_reference.simulator.trace import trace_of
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.cases import CASES, Case, SlotOrder, bounded, formats, layer
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.formats import FORMATS, CacheFormat, types_id

_OF_FORMATS = (
    *formats.IN_EVERY_FORMAT,
    *(case.id for case in (*formats.CASES, *bounded.CASES)),
)
_TURNS = {name: turn for turn, name in enumerate(_OF_FORMATS)}
SCENARIOS_IN_FORMATS = ("prefixes", "preemption", "chains", "trees", "branches", "ranks")


@dataclass(frozen=True)
class Skip:
    """The reason why a test does not run.

    Parameters
    ----------
    reason : str
        A reason that contains "not declared" means that the test is not supported. Any other
        reason means that the run excludes the test.
    undeclared_core : bool
        Whether the capability that is not declared is required, so that the verdict is "not
        conformant".
    """

    reason: str
    undeclared_core: bool = False


@dataclass(frozen=True)
class CaseParam:
    """The parameter of a test: a case in one dtype and format, and how the case was adapted."""

    case: Case
    dtype: str
    note: str = ""

    @property
    def id(self) -> str:
        """The id that a user passes to ``--only``."""
        return self.case.dtype_id(self.dtype)


@dataclass(frozen=True)
class TraceParam:
    """A scenario of the simulated engine in one dtype and format, and how it was adapted."""

    scenario: Scenario
    dtype: str
    note: str = ""

    @property
    def id(self) -> str:
        """The id that a user passes to ``--only``."""
        return f"trace-{self.scenario.name}-{types_id(self.dtype, self.scenario.cache_format)}"


def trace_params(run: Run) -> list[TraceParam]:
    """Return a parameter for every core scenario, and parameters for some in other cache formats.

    The dtypes of the run are used in rotation. Formats in which tokens share a scale are not used,
    because the oracle's output would depend on the schedule (S-19). No other format is used for
    backends with fast products, because schedules have no budget for products of 8 bits.
    """
    adapted = [adapt_scenario(scenario, run.backend.capabilities) for scenario in CORE]
    plain = [
        TraceParam(scenario, run.dtypes[i % len(run.dtypes)], note)
        for i, (scenario, note) in enumerate(adapted)
    ]
    chosen = [param for param in plain if param.scenario.name in SCENARIOS_IN_FORMATS]
    exact = run.backend.capabilities.products == "exact"
    free = [name for name in run.formats if exact and not FORMATS[name].couples_tokens]
    turns = zip(chosen, cycle(free))  # empty if there is no format
    return plain + [
        replace(param, scenario=replace(param.scenario, cache_format=name)) for param, name in turns
    ]


def params_of_group(run: Run, group: str) -> list[CaseParam]:
    """Return the cases of `group` in every dtype of the run and in the cache formats for each."""
    adapted = [adapt_case(case, run.backend.capabilities) for case in CASES[group]]
    return [
        CaseParam(_in_format(case, cache_format), dtype, note)
        for case, note in adapted
        for dtype in run.dtypes
        for cache_format in _formats_of(run, case, dtype)
    ]


def _in_format(case: Case, cache_format: str | None) -> Case:
    """Return the case in a cache format; it is copied only if needed, because copies take long."""
    return case if case.cache_format == cache_format else replace(case, cache_format=cache_format)


def _formats_of(run: Run, case: Case, dtype: str) -> tuple[str | None, ...]:
    """Return the cache formats in which `case` runs with `dtype`; ``None`` is the plain format.

    Cases outside of ``_OF_FORMATS`` run only in the plain format. With the first dtype of the run,
    the other cases run in every declared format that the rules allow for them. With every other
    dtype, and on an interpreter, which is slow, they run in one more format, and the formats
    rotate. A case of the group ``formats`` has no plain run if its cache scale is 1. Layers of
    backends with fast products run only in the plain format, because they have no budget for
    products of 8 bits.
    """
    own = case.group == formats.GROUP
    if case.group == layer.GROUP and run.backend.capabilities.products != "exact":
        return (None,)
    plain: tuple[str | None, ...] = () if own and case.cache_scale == 1 else (None,)
    if case.id not in _TURNS:
        return plain
    named = [name for name in run.formats if allows(FORMATS[name], case)]
    turn = run.dtypes.index(dtype)
    if named and (turn > 0 or run.backend.mode == "interpreter"):
        named = [named[(_TURNS[case.id] + turn) % len(named)]]
    return (*plain, *named)


def allows(stored: CacheFormat, case: Case) -> bool:
    """Return whether the rules allow a cache of this format for `case` (S-11).

    The block size must fit the format. If tokens share a scale, explicit slots must leave no holes
    between tokens.
    """
    filled = {SlotOrder.SWAPPED, SlotOrder.TABLE, SlotOrder.PERMUTED}
    holes = case.explicit_slots and case.slot_order not in filled
    return not case.block_size % stored.block_size_multiple and not (
        holes and stored.couples_tokens
    )


def why_skip(run: Run, param: CaseParam, ops: tuple[str, ...]) -> Skip | None:
    """Return why `param` does not run through the operations `ops`, or ``None`` if it runs."""
    undeclared = why_undeclared(run, param.case, param.dtype, ops)
    if undeclared is not None:
        return undeclared
    problem = param.case.problem(run.dims, param.dtype)
    if run.backend.mode == "interpreter":
        if param.case.is_large:
            return Skip("the case is too large: it would take an interpreter minutes")
        if param.case.is_slow:
            return Skip("the case is too slow: it would take an interpreter more than five seconds")
    needed = problem.num_blocks * problem.layout.block_bytes
    if needed > run.backend.memory_bytes:
        have = run.backend.memory_bytes
        return Skip(
            f"the case needs a cache of {needed / 2**30:.1f} GiB; {have / 2**30:.1f} GiB are free"
        )
    return None


def why_undeclared(run: Run, case: Case, dtype: str, ops: tuple[str, ...]) -> Skip | None:
    """Return which capabilities of `case` the backend does not declare, or ``None`` if none."""
    unmet = unmet_by_case(run.backend.capabilities, case, run.dims, dtype, ops)
    return _skip(run, unmet) if unmet else None


def unmet_by_case(
    capabilities: Capabilities, case: Case, dims: MlaDims, dtype: str, ops: tuple[str, ...]
) -> list[str]:
    """Return a phrase for each capability that `case` needs through `ops` and that is missing."""
    unmet = capabilities.unmet(case.problem(dims, dtype), ops, case.required_features)
    if case.max_query_len > capabilities.max_query_len:
        unmet.append(f"query_len {case.max_query_len} not declared")
    return unmet


def why_skip_trace(run: Run, param: TraceParam) -> Skip | None:
    """Return why a trace does not run on the backend, or ``None`` if it runs."""
    unmet = unmet_by_trace(run.backend.capabilities, param.scenario, run.dims, param.dtype)
    return _skip(run, unmet) if unmet else None


def unmet_by_trace(
    capabilities: Capabilities, scenario: Scenario, dims: MlaDims, dtype: str
) -> list[str]:
    """Return a phrase for each capability that the steps of `scenario` need and that is missing."""
    trace = trace_of(scenario, dims, dtype)
    ops, features = ["plan", "append", "attend"], ["mixed", "padding", "replay"]
    if trace.world > 1:
        ops, features = [*ops, "merge"], [*features, "explicit_slots"]
    unmet: list[str] = []
    for problem in trace.problems.values():
        unmet += capabilities.unmet(problem, ops, features)
    longest = max(scenario.config.token_budget, scenario.config.lookahead)
    if longest > capabilities.max_query_len:
        unmet.append(f"query_len {longest} not declared")
    return list(dict.fromkeys(unmet))


def why_skip_word(run: Run, word: str) -> Skip | None:
    """Return why tests that need the operation or feature `word` do not run, if they do not."""
    capabilities = run.backend.capabilities
    if word in capabilities.ops | capabilities.features:
        return None
    return _skip(run, [f"{word} not declared"])


def check_left_out(profile: Profile) -> None:
    """Check that every group and case that a profile leaves out exists.

    Raises
    ------
    ValueError
        The profile leaves out an unknown group or case.
    """
    known = {*SUITE_GROUPS, *(case.id for cases in CASES.values() for case in cases)}
    unknown = sorted(set(profile.left_out) - known)
    if unknown:
        raise ValueError(
            f"profile {profile.name}: left_out: the suite has no group or case {unknown}; "
            "use names of groups or ids of cases"
        )


def why_left_out(run: Run, group: str, case: str | None) -> Skip | None:
    """Return why the run's profile excludes a group or a case, or ``None`` if it does not.

    The group ``bounded`` runs only with the conventions of the rules, because a profile does not
    define how illegal steps are presented.
    """
    if group == bounded.GROUP and not run.profile.as_written:
        return Skip(f"bounded steps do not run in profile {run.profile.name}; use profile strict")
    if {group, case}.isdisjoint(run.profile.left_out):
        return None
    return Skip(f"profile {run.profile.name} excludes this test")


def _skip(run: Run, unmet: list[str]) -> Skip:
    optional = [u for u in unmet if any(name in u.split() for name in run.core.optional)]
    core = len(optional) < len(unmet)
    status = "core" if core else f"optional in mode {run.backend.mode}"
    if core and run.profile.undeclared == "skips":
        core, status = False, f"not required in profile {run.profile.name}"
    return Skip(f"{'; '.join(unmet)} ({status})", core)
