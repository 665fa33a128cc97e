"""Generate with SGLang through this backend and through SGLang's own, at the same histories.

    python -m paged_mla_optimized.engines.sglang.tools.check [SCENE ...] [--jobs 16] [--folder out]

Every engine runs in a process of its own (``answer.py``), several at a time: times mean nothing
then. What matters most is asked first: ours in every scene, then one of SGLang's own backends for
each model and type of cache. A history is what the yardstick generates for these, eagerly and with
no drafts: ``--tokens`` for each prompt, or more where a scene needs them. Then each backend, in the
scene's graphs, speculation and cache, says what it thinks of every step: once with an empty prefix
cache and once with hits. A line has, for each of the two, the largest and the median difference of
logprobs to the yardstick, the steps whose likeliest token differs, and the largest gap there. All
numbers are in ``FOLDER/SCENE.json``, also of every two passes of SGLang's own backends. The exit
status is 1 if a scene failed, or was further from the yardstick than any two of those are from each
other, in all scenes of the same model and type of cache: of this run, and of those that ``--out``
adds to.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch

from paged_mla_optimized.engines.sglang.registration import NAME
from paged_mla_optimized.engines.sglang.tools.answer import give, models
from paged_mla_optimized.engines.sglang.tools.scenes import (
    EVERY_SCENE,
    SCENES,
    SCENES_OF_TWO_GPUS,
    Scene,
)
from paged_mla_optimized.engines.tools.apart import options_of, run_apart
from paged_mla_optimized.engines.tools.history import pairs
from paged_mla_optimized.engines.tools.report import judge, read, write

_ANSWER = "paged_mla_optimized.engines.sglang.tools.answer"

Run: TypeAlias = dict[str, Any]
"""What an engine said, or the ``error`` that ended it."""


def main() -> int:
    """Ask the engines of scenes, and compare."""
    scenes = SCENES | (SCENES_OF_TWO_GPUS if torch.cuda.device_count() > 1 else {})
    options = options_of(__doc__, scenes, jobs=16, folder="out/sglang")
    for name in options.scenes:  # once, not in each process
        models(scenes[name], options.folder)
    results = ask(options.scenes, options)
    problems = judge(results, NAME, scenes, problem_of, read(options.out, "sglang"))
    failed = [name for name, problem in problems.items() if problem]
    print(f"beyond or failed: {', '.join(failed) or 'none'}")
    if options.out:
        write(options.out, "sglang", NAME, results, problems)
    return 1 if failed else 0


def ask(names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Have histories begun, and followed by engines that are made meanwhile."""
    folder, deadline = options.folder, time.monotonic() + options.seconds

    def run(stem: str, name: str, *more: str) -> Run:
        return run_apart(_ANSWER, stem, folder, ["--scene", name, *more], deadline)

    def begin(history: str) -> Run:
        scenes = [EVERY_SCENE[name] for name in names]
        wanted = [scene.tokens for scene in scenes if scene.history == history]
        tokens = max(options.tokens, *wanted)
        found = run(history, scene_of[history], "--tokens", str(tokens))
        if "error" in found:
            give(_pickle(folder, history), b"")  # nobody waits for it any longer
        return found

    def follow(name: str, backend: str) -> Run:
        history = EVERY_SCENE[name].history
        if begun[history].done() and "error" in begun[history].result():
            return {"error": "no history"}
        given = ["--backend", backend, "--history", str(_pickle(folder, history))]
        return run(f"{name}-{backend}", name, *given)

    scene_of = {EVERY_SCENE[name].history: name for name in names}
    for history in scene_of:
        _pickle(folder, history).unlink(missing_ok=True)  # of an earlier run
    with ThreadPoolExecutor(options.jobs) as pool:  # in this order: histories are never waited for
        begun = {history: pool.submit(begin, history) for history in scene_of}
        told = {job: pool.submit(follow, *job) for job in in_order(names)}
    return {
        name: compare(
            name,
            begun[EVERY_SCENE[name].history].result(),
            {backend: told[name, backend].result() for backend in (NAME, *EVERY_SCENE[name].peers)},
            folder,
        )
        for name in names
    }


def in_order(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return scenes and backends: ours, a peer of each model and type of cache, the others."""
    first = {EVERY_SCENE[name].history: name for name in reversed(names)}
    jobs = [(name, NAME) for name in names]
    jobs += [(name, EVERY_SCENE[name].peers[0]) for name in names if name in first.values()]
    jobs += [(name, peer) for name in names for peer in EVERY_SCENE[name].peers]
    return list(dict.fromkeys(jobs))


def compare(name: str, begun: Run, told: dict[str, Run], folder: Path) -> dict[str, Any]:
    """Return a scene's runs and how far its own backends are apart, and write them."""

    def logprobs(stem: str) -> Any:
        return pickle.loads(_pickle(folder, stem).read_bytes())

    runs = [{"run": "history"} | begun]
    runs += [{"run": backend} | run for backend, run in told.items()]
    found: dict[str, Any] = {"runs": runs, "own": []}
    if "error" not in begun:
        history, again = logprobs(EVERY_SCENE[name].history)
        own = {
            backend: logprobs(f"{name}-{backend}")
            for backend, run in told.items()
            if backend != NAME and "error" not in run
        }
        found["own"] = pairs(history, {begun["run"]: again} | own)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    return found


def _pickle(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.pickle"


def problem_of(scene: Scene, ours: Run) -> str:
    """Return what is wrong with our run of a scene, or nothing."""
    if scene.retracts and ours["retractions"] == 0:
        return "no row was taken back"
    return "no prefix was hit" if ours["cached_tokens"][1] == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
