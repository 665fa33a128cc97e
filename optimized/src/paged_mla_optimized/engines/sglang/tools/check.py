"""Compare the logprobs of this backend and of SGLang's own backends at the same histories.

    python -m paged_mla_optimized.engines.sglang.tools.check [WORKLOAD ...] [--folder out]

Every engine runs in its own process (``answer.py``), several at a time, so this command measures no
times. The most important engines run first: this backend in every workload, then one of SGLang's
own backends for each model and cache dtype. The reference backend ``YARDSTICK`` generates one
history for each model and cache dtype, eagerly and without drafts. It has ``--tokens`` tokens for
each prompt, or more if a workload needs them. Then each backend computes the logprobs of every
step, with the CUDA graphs, speculation and cache of the workload: once with an empty prefix cache
and once with prefix hits. A line has for each of the two passes the largest and the median
difference of the logprobs to the reference, the number of steps whose most likely token differs,
and the largest gap there. ``FOLDER/WORKLOAD.json`` contains all numbers, and the distances between
every two passes of SGLang's own backends. The exit status is 1 if a workload failed, or if this
backend is further from the reference than any two of SGLang's own passes are from each other, in
all workloads of the same model and cache dtype. These include the earlier workloads in the files of
``--out``.
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
"""The numbers of an engine, or the ``error`` that ended it."""


def main() -> int:
    """Run the engines of the workloads and compare them; return 1 if one failed, else 0."""
    scenes = SCENES | (SCENES_OF_TWO_GPUS if torch.cuda.device_count() > 1 else {})
    options = options_of(__doc__, scenes, jobs=16, folder="out/sglang")
    for name in options.scenes:  # here, so that the processes do not write the same model
        models(scenes[name], options.folder)
    results = ask(options.scenes, options)
    problems = judge(results, NAME, scenes, problem_of, read(options.out, "sglang"))
    failed = [name for name, problem in problems.items() if problem]
    print(f"failed: {', '.join(failed) or 'none'}")
    if options.out:
        write(options.out, "sglang", NAME, results, problems)
    return 1 if failed else 0


def ask(names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run the engines that generate the histories and those that follow; return the results."""
    folder, deadline = options.folder, time.monotonic() + options.seconds

    def run(stem: str, name: str, *more: str) -> Run:
        return run_apart(_ANSWER, stem, folder, ["--scene", name, *more], deadline)

    def begin(history: str) -> Run:
        scenes = [EVERY_SCENE[name] for name in names]
        wanted = [scene.tokens for scene in scenes if scene.history == history]
        tokens = max(options.tokens, *wanted)
        found = run(history, scene_of[history], "--tokens", str(tokens))
        if "error" in found:
            give(_pickle(folder, history), b"")  # the engines that wait for it stop
        return found

    def follow(name: str, backend: str) -> Run:
        history = EVERY_SCENE[name].history
        if begun[history].done() and "error" in begun[history].result():
            return {"error": "no history"}
        given = ["--backend", backend, "--history", str(_pickle(folder, history))]
        return run(f"{name}-{backend}", name, *given)

    scene_of = {EVERY_SCENE[name].history: name for name in names}
    for history in scene_of:
        _pickle(folder, history).unlink(missing_ok=True)  # the file of an earlier run
    # Histories are submitted first, so that no engine waits for a history that has not started.
    with ThreadPoolExecutor(options.jobs) as pool:
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
    """Return pairs of workload and backend in the order in which they run.

    First is this package's backend in every workload, then one backend of SGLang for each model and
    cache dtype, then all other pairs.
    """
    first = {EVERY_SCENE[name].history: name for name in reversed(names)}
    jobs = [(name, NAME) for name in names]
    jobs += [(name, EVERY_SCENE[name].peers[0]) for name in names if name in first.values()]
    jobs += [(name, peer) for name in names for peer in EVERY_SCENE[name].peers]
    return list(dict.fromkeys(jobs))


def compare(name: str, begun: Run, told: dict[str, Run], folder: Path) -> dict[str, Any]:
    """Write and return a workload's runs and the distances between SGLang's own backends."""

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
    """Return the problem of this backend's run of a workload, or "" without a problem."""
    if scene.retracts and ours["retractions"] == 0:
        return "no row was retracted"
    return "no prefix was hit" if ours["cached_tokens"][1] == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
