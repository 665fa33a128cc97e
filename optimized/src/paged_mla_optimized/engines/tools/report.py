"""The printed results and the report files of a command that compares an engine's backends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from paged_mla_optimized.engines.tools.history import beyond, told
from paged_mla_optimized.runtime.device import device_record
from paged_mla_optimized.tools.bench.table import head_of, row_of
from paged_mla_shared.folders import make_folders, with_ending

_COLUMNS = ["scene", "steps", "nats apart, most; with prefix hits", "median", "likeliest differs"]
_COLUMNS += ["gap there, most", "own two: nats apart, most", "gap, most", "commit"]
_FAILS = (
    "A workload fails if it is further from the reference backend than any two passes of the "
    "engine's own backends are from each other in all workloads of the same model and cache."
)


Result: TypeAlias = dict[str, Any]
"""The result of a workload.

It has the ``runs`` and the distances ``own`` between every two passes of the engine's own backends,
or the ``error`` that ended the workload.
"""


class Scene(Protocol):
    """A workload: a configuration of an engine and its model."""

    @property
    def heads(self) -> int:
        """The number of heads of the model."""

    @property
    def kv_cache_dtype(self) -> str:
        """The engine's name of the cache dtype."""


S = TypeVar("S", bound=Scene)


def judge(
    results: dict[str, Result],
    ours: str,
    scenes: Mapping[str, S],
    problem_of: Callable[[S, dict[str, Any]], str],
    earlier: Mapping[str, Result] | None = None,
) -> dict[str, str]:
    """Print the result of every workload; return the problem of each, or "" without a problem.

    The passes of this package's backend must not be further from the reference backend than any two
    passes of the engine's own backends are from each other, in all workloads of the same model and
    cache, including those of `earlier` runs.

    Parameters
    ----------
    results : dict
        The result of each workload, by name.
    ours : str
        The name of this package's backend.
    scenes : mapping
        The workloads, by name.
    problem_of : callable
        Returns any other problem of a workload and of the run with this package's backend.
    earlier : mapping or None
        Results of earlier runs, as :func:`read` returns them.
    """
    found, known = {}, {**(earlier or {}), **results}
    width = max(map(len, results))
    for name, result in results.items():
        runs = result.get("runs", [])
        for run in runs:
            said = f"{run['passes'][0]['steps']} {told(run)}" if "passes" in run else _failure(run)
            print(f"{name:{width}} {run['run']:17} {said}")
        mine = [run for run in runs if run["run"] == ours and "passes" in run]
        if mine:
            problem = problem_of(scenes[name], mine[0])
            problem = problem or _beyond(mine[0]["passes"], _own(name, known, scenes, ours))
        else:
            problem = f"{ours} has no result: {result.get('error', f'see {name}.log')}"
        print(f"{name:{width}} {problem or 'passed: within the distance of other backends'}")
        found[name] = problem
    return found


def _failure(run: dict[str, Any]) -> str:
    return f"failed: {run['error'].splitlines()[-1][:110]}"


def _beyond(ours: list[Any], own: list[Any]) -> str:
    return beyond(ours, own) if own else "no backend of the engine itself has a result to compare"


def _own(name: str, results: Mapping[str, Result], scenes: Mapping[str, S], ours: str) -> list[Any]:
    """Return the pairs of all workloads of the same model and cache.

    A workload counts only if another backend of the engine than the reference backend has a result.
    """

    def model(scene: S) -> tuple[int, str]:
        return scene.heads, scene.kv_cache_dtype

    def answered(result: Result) -> bool:
        _, *followers = result.get("runs") or [None]
        return any("passes" in run for run in followers if run["run"] != ours)

    return [
        pair
        for n, result in results.items()
        if n in scenes and model(scenes[n]) == model(scenes[name]) and answered(result)
        for pair in result["own"]
    ]


def read(stem: Path | None, engine: str) -> dict[str, Result]:
    """Return the results in STEM.json that have this release of the engine and this device."""
    path = with_ending(stem, ".json") if stem else None
    if path is None or not path.exists():
        return {}
    here = _facts(engine)
    return {
        name: scene
        for name, scene in json.loads(path.read_text()).items()
        if all(scene["facts"][key] == here[key] for key in ("engine", "device"))
    }


def _facts(engine: str) -> dict[str, str]:
    return device_record() | {"engine": f"{engine} {version(engine)}"}


def write(
    stem: Path, engine: str, ours: str, results: dict[str, Result], problems: dict[str, str]
) -> None:
    """Add results, with the problems that :func:`judge` returned, to the files of :func:`add`.

    Parameters
    ----------
    stem : Path
        STEM.json and STEM.md are written.
    engine : str
        The package of the engine.
    ours : str
        The name of this package's backend in the engine.
    results, problems : dict
        The result and the problem of each workload, by name.
    """
    judged = {name: {"problem": problems[name]} | result for name, result in results.items()}
    add(stem, engine, judged, partial(page, ours=ours))


def add(
    stem: Path,
    engine: str,
    results: dict[str, Result],
    page_of: Callable[[dict[str, Result]], str],
) -> None:
    """Add results to STEM.json and write STEM.md; other workloads of earlier runs stay.

    Parameters
    ----------
    stem : Path
    engine : str
        The package of the engine.
    results : dict
        The result of each workload, by name.
    page_of : callable
        Returns the text of STEM.md for all results, to which ``facts`` have been added.
    """
    path = with_ending(stem, ".json")
    scenes = json.loads(path.read_text()) if path.exists() else {}
    facts = _facts(engine)
    scenes |= {name: {"facts": facts} | result for name, result in results.items()}
    make_folders(path)
    path.write_text(json.dumps(scenes) + "\n")
    with_ending(stem, ".md").write_text(page_of(scenes))


def places(scenes: dict[str, Result]) -> list[str]:
    """Return a line for each combination of engine, device, versions and date of the results."""
    place = "{engine}, {device}, torch {torch}, triton {triton}, {date}"
    return sorted({place.format(**scene["facts"]) for scene in scenes.values()})


def page(scenes: dict[str, Result], ours: str) -> str:
    """Return the page with the table of all workloads."""
    lines = [*places(scenes), "", head_of(_COLUMNS)]
    lines += [_line(name, scene, ours) for name, scene in sorted(scenes.items())]
    problems = [f"{name}: {found['problem']}" for name, found in scenes.items() if found["problem"]]
    return "\n".join([*lines, "", *(problems or ["No workload failed."]), _FAILS]) + "\n"


def _line(name: str, scene: Result, ours: str) -> str:
    own, commit = scene.get("own", []), scene["facts"]["commit"]
    passes = [
        p for run in scene.get("runs", []) if run["run"] == ours for p in run.get("passes", [])
    ]

    def each(word: str, form: str) -> str:
        return "; ".join(format(p[word], form) for p in passes) or "-"

    def most(word: str) -> str:
        return f"{max(p[word] for p in own):.4f}" if own else "-"

    cells = [name, each("steps", "d"), each("largest", ".4f"), each("median", ".4f")]
    cells += [each("others", "d"), each("gap", ".4f"), most("largest"), most("gap"), commit]
    return row_of(cells)
