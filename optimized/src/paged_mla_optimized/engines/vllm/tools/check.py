"""Generate with vLLM through this backend and through vLLM's own, at the same histories.

    python -m paged_mla_optimized.engines.vllm.tools.check [SCENE ...] [--jobs 8] [--folder out]

Every scene of ``scenes.py`` runs in a process of its own, several at a time: times mean nothing
then. Its history is what the yardstick generates, eagerly and with no drafts. Then each backend, in
the scene's graphs, speculation and cache, says what it thinks of every step (``follow.py``): once
with an empty prefix cache and once with hits. A line has, for each of the two, the largest and the
median difference of logprobs to the yardstick, the steps whose likeliest token differs, and the
largest gap there; then preempted requests and steps that verified drafts. All numbers are in
``FOLDER/SCENE.json``. The exit status is 1 if a scene failed, or was beyond what vLLM's own
backends are apart.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.tools.apart import options_of, run_scenes
from paged_mla_optimized.engines.tools.history import begin, beyond, passes, passes_of, told
from paged_mla_optimized.engines.tools.model import build_model
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools.engine import arguments, ask, prepare, run_engine
from paged_mla_optimized.engines.vllm.tools.scenes import (
    MAX_MODEL_LEN,
    SCENES,
    YARDSTICK,
    Scene,
    prompts,
)

_MODULE = "paged_mla_optimized.engines.vllm.tools.check"
_CACHE_BYTES = 2 << 30
_LAYERS = 4
_ROWS = (1, 2, 4, 8, 16)  # of captured graphs


def main() -> int:
    """Run scenes, or one of them in this process."""
    options = options_of(__doc__, SCENES, jobs=8, folder="out/vllm")
    names = options.scenes
    if options.here:
        [name] = names
        run_scene(name, options.folder, options.tokens)
        return 0
    for heads in sorted({SCENES[name].heads for name in names}):  # once, not in each process
        build_model(options.folder, heads=heads, layers=_LAYERS)
    if any(SCENES[name].has_mtp for name in names):
        build_model(options.folder, heads=16, layers=_LAYERS, mtp=True)
    results = run_scenes(_MODULE, options)
    found = [_tell(name, runs) for name, runs in zip(names, results, strict=True)]
    steps = sum(one for one, _ in found)
    failed = [name for name, (_, good) in zip(names, found, strict=True) if not good]
    print(f"{steps} steps through {NAME}; beyond or failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def run_scene(name: str, folder: Path, tokens: int) -> None:
    """Run one scene in this process; write what was found after each of its engines."""
    scene = SCENES[name]
    model = build_model(folder, heads=scene.heads, layers=_LAYERS, mtp=scene.has_mtp)
    plain = Scene(
        mode="eager",
        heads=scene.heads,
        block_size=scene.block_size,
        kv_cache_dtype=scene.kv_cache_dtype,
    )
    prepare()
    seen = _Counters()

    history, again = run_engine(
        _given(model, plain, YARDSTICK), lambda llm: begin(partial(ask, llm), prompts(), tokens)
    )
    runs: list[dict[str, Any]] = [{"run": f"{YARDSTICK} again", **again}]
    _write(folder, name, runs)
    for backend in (*scene.peers, NAME):
        before = time.monotonic()
        try:
            seen.forget()
            found = run_engine(
                _given(model, scene, backend), lambda llm: passes(partial(ask, llm), history, 2)
            )
            runs.append({"run": backend, **found, **seen.counts})
        except Exception:  # the others are asked all the same
            runs.append({"run": backend, "error": traceback.format_exc()[-1500:]})
        runs[-1]["seconds"] = round(time.monotonic() - before, 1)
        _write(folder, name, runs)


def _given(model: Path, scene: Scene, backend: str) -> dict[str, Any]:
    """Return what the engine of a scene is made with."""
    more = dict(scene.arguments)
    if scene.drafts:
        speculation = scene.speculation | {"num_speculative_tokens": scene.drafts}
        if speculation["method"] == "draft_model":
            speculation["model"] = str(model)
        more["speculative_config"] = speculation
    if backend == NAME:
        more |= scene.ours
    return arguments(
        model,
        backend,
        scene.mode,
        sizes=[rows * (1 + scene.drafts) for rows in _ROWS],
        block_size=scene.block_size,
        kv_cache_dtype=scene.kv_cache_dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=_ROWS[-1],
        max_num_batched_tokens=2048,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=_CACHE_BYTES,
        gpu_memory_utilization=0.1,
        **more,
    )


class _Counters:
    """Counts what a run is about: preempted requests, and steps whose rows have several tokens."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        from paged_mla_optimized.engines.vllm.decode import Decode

        self.counts: dict[str, int] = {}
        preempt, plan = Scheduler._preempt_request, Decode.plan
        counts = self.counts

        def counted_preempt(*given: Any, **named: Any) -> Any:
            counts["preemptions"] += 1
            return preempt(*given, **named)

        def counted_plan(decode: Decode, **named: Any) -> Any:
            counts["plans"] += 1
            counts["plans_of_several_tokens"] += named["num_tokens"] > len(named["seq_lens"])
            return plan(decode, **named)

        Scheduler._preempt_request = counted_preempt
        Decode.plan = counted_plan  # type: ignore[method-assign, assignment]
        self.forget()

    def forget(self) -> None:
        self.counts.update(preemptions=0, plans=0, plans_of_several_tokens=0)


def _write(folder: Path, name: str, runs: list[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(runs, indent=1))


def _tell(name: str, runs: list[dict[str, Any]]) -> tuple[int, bool]:
    """Print a scene; return how many steps went through our backend, and whether it is good."""
    for run in runs:
        if "error" in run:
            print(f"{name:16} {run['run']:17} failed: {run['error'].splitlines()[-1][:110]}")
            continue
        counted = " ".join(
            f"{run[k]}" for k in ("preemptions", "plans_of_several_tokens") if k in run
        )
        print(f"{name:16} {run['run']:17} {run['passes'][0]['steps']} {told(run)} | {counted}")
    ours, theirs = passes_of(runs, NAME)
    if not ours or not theirs:
        print(f"{name:16} no answer of {NAME}: see {name}.log")
        return 0, False
    problem = _problem(name, runs, ours, theirs)
    print(
        f"{name:16} {problem or 'as far apart as its own backends, or less, where it has others'}"
    )
    return sum(p["steps"] for p in ours), not problem


def _problem(
    name: str, runs: list[dict[str, Any]], ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> str:
    """Return what is wrong with a scene, or nothing."""
    [run] = [run for run in runs if run["run"] == NAME]
    scene = SCENES[name]
    if scene.preempts and run["preemptions"] == 0:
        return "nothing was preempted"
    if not scene.preempts and run["cached_tokens"][1] == 0:
        return "no prefix was hit"
    if scene.drafts and run["plans_of_several_tokens"] == 0:
        return "no drafts were verified"
    if scene.peers == (YARDSTICK,):
        return ""  # no other backend says how far they may be apart
    return beyond(ours, theirs, "vLLM")


if __name__ == "__main__":
    sys.exit(main())
