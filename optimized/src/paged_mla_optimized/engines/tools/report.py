"""What a command that compares an engine's backends says of its scenes, and leaves behind."""

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
from paged_mla_shared.folders import make_folders

_COLUMNS = ["scene", "steps", "nats apart, most; with prefix hits", "median", "likeliest differs"]
_COLUMNS += ["gap there, most", "own two: nats apart, most", "gap, most", "commit"]
_FAILS = (
    "A scene fails where it is further from the yardstick than any two passes of the engine's own "
    "backends are from each other in all scenes of the same model and cache."
)


Result: TypeAlias = dict[str, Any]
"""Of a scene its ``runs`` and every two passes of ``own`` backends, or what ``error`` ended it."""


class Scene(Protocol):
    """What an engine is asked."""

    @property
    def heads(self) -> int:
        """Of the model."""

    @property
    def kv_cache_dtype(self) -> str:
        """In the engine's words."""


S = TypeVar("S", bound=Scene)


def judge(
    results: dict[str, Result],
    ours: str,
    scenes: Mapping[str, S],
    problem_of: Callable[[S, dict[str, Any]], str],
    earlier: Mapping[str, Result] | None = None,
) -> dict[str, str]:
    """Print every scene; return what is wrong with each, or "".

    Our passes may not be further from the yardstick than any two passes of the engine's own
    backends are from each other, in all scenes of the same model and cache, these and `earlier`.

    Parameters
    ----------
    results : dict
        By scene.
    ours : str
        Name of our backend.
    scenes : mapping
    problem_of : callable
        Says what else is wrong with a scene and our run in it.
    earlier : mapping or None
        See :func:`read`.
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
            problem = f"no answer of {ours}: {result.get('error', f'see {name}.log')}"
        print(f"{name:{width}} {problem or 'as far apart as its own backends, or less'}")
        found[name] = problem
    return found


def _failure(run: dict[str, Any]) -> str:
    return f"failed: {run['error'].splitlines()[-1][:110]}"


def _beyond(ours: list[Any], own: list[Any]) -> str:
    return beyond(ours, own) if own else "no own backend answered that it could be held against"


def _own(name: str, results: Mapping[str, Result], scenes: Mapping[str, S], ours: str) -> list[Any]:
    """Return pairs of scenes alike, where more than the yardstick answered."""

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
    """Return what STEM.json says of scenes that this engine ran on this kind of device."""
    path = stem.with_suffix(".json") if stem else None
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
    """Write what :func:`judge` found of scenes to STEM.json and STEM.md, see :func:`add`.

    Parameters
    ----------
    stem : Path
    engine : str
        Package that was run.
    ours : str
        Name of our backend in it.
    results, problems : dict
        By scene.
    """
    judged = {name: {"problem": problems[name]} | result for name, result in results.items()}
    add(stem, engine, judged, partial(page, ours=ours))


def add(
    stem: Path,
    engine: str,
    results: dict[str, Result],
    page_of: Callable[[dict[str, Result]], str],
) -> None:
    """Write STEM.json and STEM.md: these scenes, and those of earlier runs that were not run now.

    Parameters
    ----------
    stem : Path
    engine : str
        Package that was run.
    results : dict
        By scene.
    page_of : callable
        Returns the page of all scenes: each has its ``facts`` too.
    """
    path = stem.with_suffix(".json")
    scenes = json.loads(path.read_text()) if path.exists() else {}
    facts = _facts(engine)
    scenes |= {name: {"facts": facts} | result for name, result in results.items()}
    make_folders(path)
    path.write_text(json.dumps(scenes) + "\n")
    stem.with_suffix(".md").write_text(page_of(scenes))


def places(scenes: dict[str, Result]) -> list[str]:
    """Return on what scenes ran."""
    place = "{engine}, {device}, torch {torch}, triton {triton}, {date}"
    return sorted({place.format(**scene["facts"]) for scene in scenes.values()})


def page(scenes: dict[str, Result], ours: str) -> str:
    """Return the table of all scenes."""
    lines = [*places(scenes), "", head_of(_COLUMNS)]
    lines += [_line(name, scene, ours) for name, scene in sorted(scenes.items())]
    problems = [f"{name}: {found['problem']}" for name, found in scenes.items() if found["problem"]]
    return "\n".join([*lines, "", *(problems or ["No scene failed."]), _FAILS]) + "\n"


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
