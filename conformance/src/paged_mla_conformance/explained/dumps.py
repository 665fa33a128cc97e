"""The dump of the first test that a mutant fails, as the matrix of mutants names it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paged_mla_conformance.convention import STRICT, load_profile
from paged_mla_conformance.mutants.backends import mutant, spoilt_engine
from paged_mla_conformance.profile import SUITE_GROUPS, Run
from paged_mla_conformance.recording import RecordingBackend
from paged_mla_conformance.selection import params_of_group, trace_params
from paged_mla_conformance.traces import TraceTrial
from paged_mla_conformance.trial import Trial
from paged_mla_reference.judging.compare import Mismatch, check_merge
from paged_mla_reference.merge import merge
from paged_mla_shared.cases import GROUPS, MERGES
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dump import Dump

_TEST = re.compile(r"test_(\w+)\[(.+)\]")
_ASKED: dict[str, Callable[[Trial], Any]] = {
    "decode": Trial.check_attention,
    "extend": Trial.check_attention,
    "masks": Trial.check_attention,
    "read": Trial.check_attention,
    "metadata": Trial.check_metadata,
    "append": Trial.check_append,
    "written": Trial.check_append,
    "gather": Trial.check_gather,
    "gathered": Trial.check_gather,
    "replay": Trial.check_replay,
    **dict.fromkeys(
        ("mixed", "verify", "empty", "layouts", "rope", "large_offsets"), Trial.check_step
    ),
}  # by the name of a test


@dataclass(frozen=True)
class Failed:
    """A test that a mutant failed, and the step at which it did.

    Parameters
    ----------
    mutant, test : str
    dump : Dump or None
        ``None`` where no step can be dumped: `why` says so.
    why : str
    """

    mutant: str
    test: str
    dump: Dump | None
    why: str = ""


def tests_that_kill(page: Path) -> dict[str, list[str]]:
    """Return, for each mutant, the first test of each group that kills it by a rule it breaks."""
    document = json.loads(page.read_text())
    found = {}
    for entry in document["mutants"]:
        kills = entry["kills"]
        tests = [kills[g]["rule"] for g in SUITE_GROUPS if "rule" in kills.get(g, {})]
        found[entry["name"]] = tests
    return found


def first_failure(name: str, tests: list[str]) -> Failed:
    """Run the first test of a mutant whose step can be dumped, up to where it fails."""
    for test in tests:
        parts = _TEST.fullmatch(test)
        if parts is None:
            continue
        dump = _dump_of(name, parts[1], parts[2])
        if dump is not None:
            return Failed(name, test, dump)
    return Failed(name, tests[0] if tests else "", None, "no step shows it")


def _dump_of(name: str, test: str, param: str) -> Dump | None:
    backend = RecordingBackend(mutant(name))
    try:
        with spoilt_engine(name):
            if not _run(backend, test, param):
                return None
    except Mismatch:
        pass
    else:
        return None
    return backend.last and in_noise(backend.last.dump)


def _run(backend: RecordingBackend, test: str, param: str) -> bool:
    """Ask one test; return whether there is such a one."""
    if test == "merge":
        _merge(backend, param)
        return True
    run = Run(backend, "x:y", "small", load_profile(STRICT), ("float32",))
    if test == "trace":
        [found] = [p for p in trace_params(run) if p.id == param]
        TraceTrial(backend, found.scenario, SMALL, found.dtype).check()
        return True
    if test not in _ASKED:
        return False
    group = param.partition("-")[0]
    [case] = [p for p in params_of_group(run, group) if p.id == param]
    _ASKED[test](Trial(backend, case.case, SMALL, case.dtype))
    return True


def _merge(backend: RecordingBackend, param: str) -> None:
    [case] = [case for case in MERGES if case.name == param]
    dims = SMALL.with_heads(case.num_heads)
    problem = GROUPS["decode"][0].problem(dims, "float32")
    partials = case.build(dims.kv_lora_rank)
    problem = replace(problem, dims=dims)
    check_merge(backend.prepare(problem).merge(partials), merge(partials), partials)


def in_noise(dump: Dump, seed: int = 0) -> Dump:
    """Return a dump whose answer is rounded otherwise: each number one step up or down, or kept.

    A kernel does not sum in the oracle's order. Without this, a mutant, which is the oracle, would
    be named by its bits.
    """
    rng = np.random.default_rng(seed)
    arrays = dict(dump.arrays)
    for name in ("out", "lse"):
        if name in arrays and "partial_out" not in arrays:
            array = arrays[name]
            towards = rng.choice(np.array([-np.inf, np.inf], array.dtype), array.shape)
            moved = np.isfinite(array) & (array != 0) & (rng.random(array.shape) < 2 / 3)
            arrays[name] = np.where(moved, np.nextafter(array, towards), array)
    return replace(dump, arrays=arrays)
