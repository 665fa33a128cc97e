"""Make dumps of the steps at which mutants fail tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.meta.mutants.backends import broken_engine, mutant
from paged_mla_conformance.run.quick.table import load_table
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.runners.recording_runner import RecordingBackend
from paged_mla_conformance.suite.selection.adapt_case import adapt_case, adapt_scenario
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS, Run
from paged_mla_conformance.suite.selection.params import TraceParam, allows
from paged_mla_conformance.suite.trials.layered import check_layer
from paged_mla_conformance.suite.trials.traces import TraceTrial
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.explain.checks.dump_checks import examine
from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.rules.rounding import widen
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.scenarios import CORE
from paged_mla_reference.tolerance.compare import Mismatch, check_merge
from paged_mla_shared.aliases import alias_blocks
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases import CASES, GROUPS, MERGES, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.documents import read_object
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.dump import Dump, load_dump, save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, types_id
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.poison import HUGE
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.strides import copied, memory_of

MOST_TRIED = 60  # tests in addition to those that the caller passes
_TEST = re.compile(r"test_(\w+)\[(.+)\]")
ASKED: dict[str, Callable[[Trial], Any]] = {
    "decode": Trial.check_attention,
    "extend": Trial.check_attention,
    "masks": Trial.check_attention,
    "read": Trial.check_attention,
    "metadata": Trial.check_metadata,
    "append": Trial.check_append,
    "written": Trial.check_append,
    "written_again": Trial.check_append_again,
    "gather": partial(Trial.check_read, name="gather_context"),
    "gathered": partial(Trial.check_read, name="gather_context"),
    "replay": Trial.check_replay,
    "queries": Trial.check_queries,
    "prefill": Trial.check_prefill,
    "layer": check_layer,
    "layer_whole": check_layer,
    **dict.fromkeys(
        ("mixed", "verify", "empty", "layouts", "rope", "large_offsets"), Trial.check_step
    ),
}
"""The method that runs a test, by the name of the test function without ``test_``."""


@dataclass(frozen=True)
class Failed:
    """A test that a mutant failed, and the step at which it failed.

    Parameters
    ----------
    mutant, test : str
        The names of the mutant and of the test.
    dump : Dump
        The step.
    """

    mutant: str
    test: str
    dump: Dump


def tests_that_kill(page: Path) -> dict[str, list[str]]:
    """Return, for each mutant, the first test of each group that kills it by a rule it breaks.

    Parameters
    ----------
    page : Path
        The JSON file of a matrix of mutants.

    Raises
    ------
    InvalidArgument
        The file cannot be read, or is not a matrix of mutants.
    """
    document = read_object(page)
    if "mutants" not in document:
        raise InvalidArgument(str(page), "no mutants", "a matrix of mutants")
    found = {}
    for entry in document["mutants"]:
        kills = entry["kills"]
        tests = [_of_steps(g, kills[g]["rule"]) for g in SUITE_GROUPS if "rule" in kills.get(g, {})]
        found[entry["name"]] = tests
    return found


def tests_of_the_table() -> dict[str, list[str]]:
    """Return, for each mutant, the tests in the table of the quick verdict that find it.

    Groups are in the order of the suite; the fastest test of each group comes first.
    """
    places = {group: place for place, group in enumerate(SUITE_GROUPS)}
    found: dict[str, list[str]] = {}
    for key, entry in sorted(
        load_table().items(),
        key=lambda item: (places.get(group_of(item[0]), len(places)), item[1].ms),
    ):
        for name in entry.finds:
            found.setdefault(name, []).append(_of_steps(group_of(key), _typed(key)))
    return found


def group_of(test: str) -> str:
    """Return the group of a test whose function is named after its group."""
    return test.partition("[")[0].removeprefix("test_")


def _typed(key: str) -> str:
    """Return the name of a test in float32."""
    name, _, cache_format = key.removesuffix("]").partition("+")
    if not cache_format and group_of(key) not in {*ASKED, "trace"}:
        return key
    return f"{name}-{types_id('float32', cache_format or None)}]"


def _of_steps(group: str, test: str) -> str:
    """Return a test, or the first case of its group if the test runs no step of a case."""
    if group_of(test) in ASKED or group not in ASKED:
        return test
    return f"test_{group}[{CASES[group][0].dtype_id('float32')}]"


def failures(name: str, tests: list[str]) -> Iterator[Failed]:
    """Yield the step at which a mutant fails each test, if a dump can contain the step.

    The given tests come first, then others of the same groups and formats.
    """
    for test in (*tests, *islice(_others(tests), MOST_TRIED)):
        parts = _TEST.fullmatch(test)
        if parts is None:
            continue
        dump = _dump_of(name, parts[1], parts[2])
        if dump is not None:
            yield Failed(name, test, dump)


def _others(tests: list[str]) -> Iterator[str]:
    """Yield other tests with the functions, groups and cache formats of some tests."""
    for test in tests:
        parts = _TEST.fullmatch(test)
        if parts is None:
            continue
        ids = []
        if parts[1] == "merge":
            ids = [case.name for case in MERGES]
        elif parts[1] in ASKED:
            group, _, named = parts[2].partition("-fp32")
            stored = FORMATS.get(named.removeprefix("-"))
            cases = CASES[group.partition("-")[0]]
            asked = [case for case in cases if stored is None or allows(stored, case)]
            ids = [f"{case.dtype_id('float32')}{named}" for case in asked]
        yield from (other for i in ids if (other := f"test_{parts[1]}[{i}]") not in tests)


def _dump_of(name: str, test: str, param: str) -> Dump | None:
    """Return the step at which a mutant fails a test.

    The result is ``None`` if the mutant does not fail, or if no dump can contain the step.
    """
    with broken_engine(name):
        return failing_step(lambda: mutant(name), lambda backend: _run(backend, test, param))


def failing_step(
    make: Callable[[], Backend], ask: Callable[[RecordingBackend], None]
) -> Dump | None:
    """Return the step at which a backend fails a check.

    The result is ``None`` if the backend does not fail, or if no dump can contain the step.

    Caches of the suite hold NaN in memory that must not be read. Caches of engines hold other
    tokens there. The step runs again over such a cache and is returned if it fails there too.

    Parameters
    ----------
    make : callable
        Returns a new backend.
    ask : callable
        Runs a check on a backend; raises ``Mismatch`` if it fails.
    """
    failed = RecordingBackend(make())
    try:
        ask(failed)
    except Mismatch:
        pass
    else:
        return None
    if failed.last is None:
        return None
    again = RecordingBackend(make())
    runner = again.prepare(failed.last.problem)
    for call, arguments in failed.last.calls:
        getattr(runner, call)(*[used(x) for x in arguments])
    if again.last is not None:
        dump = in_noise(again.last.dump)
        if examine(Step.of(dump)).first is not None:
            return _as_read(dump)
    return _as_read(in_noise(failed.last.dump))


def _as_read(dump: Dump) -> Dump | None:
    """Return a dump after writing and reading a file; ``None`` if no file can contain it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "dump.safetensors"
        try:
            save_dump(dump, path)
        except InvalidArgument:  # an output of another type
            return None
        return load_dump(path)


def _run(backend: RecordingBackend, test: str, param: str) -> None:
    """Run one test if it consists of steps, a merge or a trace."""
    run = Run(backend, "x:y", "small", load_profile(STRICT), ("float32",))
    if test == "merge":
        _merge(backend, param)
    elif test == "trace":
        scenarios = {p.id: p.scenario for scenario in CORE for p in _traces(scenario)}
        scenario, _ = adapt_scenario(scenarios[param], backend.capabilities)
        TraceTrial(backend, scenario, SMALL, "float32").check()
    elif test in ASKED:
        cases = {
            c.dtype_id("float32"): c
            for case in CASES[param.partition("-")[0]]
            for c in _cases(case)
        }
        adapted, _ = adapt_case(cases[param], run.backend.capabilities)
        ASKED[test](Trial(backend, adapted, SMALL, "float32"))


def _cases(case: Case) -> list[Case]:
    return [replace(case, cache_format=name) for name in (None, *FORMATS)]


def _traces(scenario: Scenario) -> list[TraceParam]:
    formats = (None, *FORMATS)
    return [TraceParam(replace(scenario, cache_format=name), "float32") for name in formats]


def used(given: Any) -> Any:
    """Return a cache or a prefill with other tokens in place of poison; others are unchanged."""
    if isinstance(given, CacheImage):
        return _used_cache(given)
    if isinstance(given, PrefillBatch):
        k_nope, k_pe, v = map(_used_keys, (given.k_nope, given.k_pe, given.v))
        return replace(given, k_nope=k_nope, k_pe=k_pe, v=v)
    return given


def _used_keys(keys: NDArray[Any]) -> NDArray[Any]:
    """Return keys or values with numbers of a key's size in memory that must not be read."""
    found = copied(keys)
    memory = memory_of(found)  # includes the gaps between elements
    poisoned = ~(np.abs(widen(memory)) < HUGE / 10)
    drawn = np.random.default_rng(len(keys)).standard_normal(memory.shape)
    memory[poisoned] = drawn[poisoned].astype(memory.dtype)
    return found


def _used_cache(image: CacheImage) -> CacheImage:
    """Return a cache with other tokens in place of poison: finite numbers of a latent's size.

    The numbers depend on the block and the place in it. Blocks that overflowed offsets reach also
    get tokens of their own. All other blocks are equal, because no known fault reads them.
    """
    layout = image.layout
    itemsize = numpy_dtype(layout.format.ckv_dtype).itemsize
    aliases = alias_blocks(image.block_ids, layout.block_stride // itemsize, itemsize)
    ids = np.concatenate([image.block_ids, aliases])
    blocks = image.read(ids)
    for field in layout.format.fields(layout.dims):
        values = layout.field(blocks, field.name)
        values[...] = _filled(widen(values), ids).astype(values.dtype)
    scales = layout.scales(blocks)
    scales[...] = np.abs(_filled(widen(scales), ids))
    unlisted = np.array([0.5, -0.25], numpy_dtype(layout.format.ckv_dtype)).view(np.uint8)
    poison = unlisted if len(image.poison) % len(unlisted) == 0 else image.poison
    return replace(image, block_ids=ids, blocks=blocks, poison=poison)


def _filled(values: NDArray[np.float64], block_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return values with random numbers of each block in place of NaN and huge numbers."""
    drawn = [np.random.default_rng(int(b)).standard_normal(values.shape[1:]) for b in block_ids]
    poisoned = ~(np.abs(values) < HUGE / 10)
    return np.where(poisoned, np.array(drawn).reshape(values.shape), values)


def _merge(backend: RecordingBackend, param: str) -> None:
    [case] = [case for case in MERGES if case.name == param]
    dims = SMALL.with_heads(case.num_heads)
    problem = GROUPS["decode"][0].problem(dims, "float32")
    partials = case.build(dims.kv_lora_rank)
    problem = replace(problem, dims=dims)
    check_merge(backend.prepare(problem).merge(partials), merge(partials), partials)


def in_noise(dump: Dump, seed: int = 0) -> Dump:
    """Return a dump with a differently rounded output: numbers move by one unit in the last place.

    A dump of partial results is returned unchanged.

    A kernel does not sum in the oracle's order. A mutant is a changed oracle, so without this its
    bits would identify it. Numbers of more than half of a token's largest number are kept, because
    their last place may be as large as a budget.
    """
    if "partial_out" in dump.arrays:
        return dump
    rng = np.random.default_rng(seed)
    arrays = dict(dump.arrays)
    for kind in ("", "layer_", "prefill_"):
        lse = arrays.get(f"{kind}lse")
        if lse is None or not lse.size:
            continue
        seen = np.isfinite(lse)
        for name in (f"{kind}out", f"{kind}lse"):
            arrays[name] = _moved(arrays[name], seen, rng)
    return replace(dump, arrays=arrays)


def _moved(array: NDArray[Any], seen: NDArray[np.bool_], rng: np.random.Generator) -> NDArray[Any]:
    """Return the array with random small numbers moved by one unit in the last place."""
    size = np.abs(np.where(np.isfinite(array), array, 0)).astype(np.float64)
    largest = size.reshape(len(size), -1).max(axis=1, initial=0.0)
    small = size <= largest.reshape(-1, *[1] * (array.ndim - 1)) / 2
    moved = small & (size > 0) & seen.reshape(*seen.shape, *[1] * (array.ndim - seen.ndim))
    moved &= rng.random(array.shape) < 2 / 3
    towards = rng.choice(np.array([-np.inf, np.inf], array.dtype), array.shape)
    return np.where(moved, np.nextafter(array, towards), array)
