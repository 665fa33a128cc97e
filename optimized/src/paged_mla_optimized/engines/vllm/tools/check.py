"""Generate with vLLM through this backend and through vLLM's own, at the same histories.

    python -m paged_mla_optimized.engines.vllm.tools.check [SCENE ...] [--jobs 8] [--folder out]

Every scene of ``scenes.py`` runs in a process of its own, several at a time: times mean nothing
then. Its history is what the yardstick generates, eagerly and with no drafts. Then each backend, in
the scene's graphs, speculation and cache, says what it thinks of every step (``follow.py``): once
with an empty prefix cache and once with hits. A line has, for each of the two, the largest and the
median difference of logprobs to the yardstick, the steps whose likeliest token differs, and the
largest gap there. All numbers are in
``FOLDER/SCENE.json``, also of every two passes of vLLM's own backends. The exit status is 1 if a
scene failed, or was further from the yardstick than any two of those are from each other, in all
scenes of the same model and cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_mla_optimized.engines.tools.apart import options_of, run_scenes
from paged_mla_optimized.engines.tools.history import begin, pairs, passes
from paged_mla_optimized.engines.tools.model import build_models
from paged_mla_optimized.engines.tools.report import judge, read, write
from paged_mla_optimized.engines.vllm.registration import NAME
from paged_mla_optimized.engines.vllm.tools.engine import arguments, ask, prepare, run_engine
from paged_mla_optimized.engines.vllm.tools.scenes import (
    MAX_MODEL_LEN,
    SCENES,
    SCENES_OF_TWO_GPUS,
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
    scenes = SCENES | (SCENES_OF_TWO_GPUS if torch.cuda.device_count() > 1 else {})
    options = options_of(__doc__, scenes, jobs=8, folder="out/vllm")
    names = options.scenes
    if options.here:
        [name] = names
        run_scene(name, options.folder, options.tokens)
        return 0
    for scene in (scenes[name] for name in names):  # once, not in each process
        _models(options.folder, scene)
    results = dict(zip(names, run_scenes(_MODULE, options), strict=True))
    problems = judge(results, NAME, scenes, problem_of, read(options.out, "vllm"))
    failed = [name for name, problem in problems.items() if problem]
    print(f"beyond or failed: {', '.join(failed) or 'none'}")
    if options.out:
        write(options.out, "vllm", NAME, results, problems)
    return 1 if failed else 0


def run_scene(name: str, folder: Path, tokens: int) -> None:
    """Run one scene in this process; write what was found after each of its engines."""
    scene = (SCENES | SCENES_OF_TWO_GPUS)[name]
    models = _models(folder, scene)
    plain = Scene(
        mode="eager",
        heads=scene.heads,
        block_size=scene.block_size,
        kv_cache_dtype=scene.kv_cache_dtype,
    )
    prepare()
    seen = _Counters()

    history, (numbers, logprobs) = run_engine(
        _given(models, plain, YARDSTICK), lambda llm: begin(partial(ask, llm), prompts(), tokens)
    )
    runs: list[dict[str, Any]] = [{"run": f"{YARDSTICK} again", **numbers}]
    own = {f"{YARDSTICK} again": logprobs}
    for backend in (*scene.peers, NAME):
        before = time.monotonic()
        try:
            seen.forget()
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(scene.own_process))
            numbers, logprobs = run_engine(
                _given(models, scene, backend), lambda llm: passes(partial(ask, llm), history, 2)
            )
            runs.append({"run": backend, **numbers, **seen.counts})
            if backend != NAME:
                own[backend] = logprobs
        except Exception:  # the others are asked all the same
            runs.append({"run": backend, "error": traceback.format_exc()[-1500:]})
        runs[-1]["seconds"] = round(time.monotonic() - before, 1)
        found = {"runs": runs, "own": pairs(history, own)}
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))


def _models(folder: Path, scene: Scene) -> tuple[Path, Path]:
    return build_models(
        folder,
        heads=scene.heads,
        layers=_LAYERS,
        mtp=scene.has_mtp,
        drafts=scene.has_draft_model,
    )


def _given(models: tuple[Path, Path], scene: Scene, backend: str) -> dict[str, Any]:
    """Return what the engine of a scene is made with."""
    more = dict(scene.arguments)
    if scene.drafts:
        speculation = scene.speculation | {"num_speculative_tokens": scene.drafts}
        if scene.has_draft_model:
            speculation["model"] = str(models[1])
        more["speculative_config"] = speculation
    if backend == NAME:
        more |= scene.ours
    return arguments(
        models[0],
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
    """Counts what a run is about: preempted requests, and steps that verify drafts."""

    def __init__(self) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler

        self.counts: dict[str, int] = {}
        preempt, schedule = Scheduler._preempt_request, Scheduler.schedule
        counts = self.counts

        def counted_preempt(*given: Any, **named: Any) -> Any:
            counts["preemptions"] += 1
            return preempt(*given, **named)

        def counted_schedule(*given: Any, **named: Any) -> Any:
            step = schedule(*given, **named)
            counts["steps_with_drafts"] += bool(step.scheduled_spec_decode_tokens)
            return step

        Scheduler._preempt_request = counted_preempt
        Scheduler.schedule = counted_schedule
        self.forget()

    def forget(self) -> None:
        self.counts.update(preemptions=0, steps_with_drafts=0)


def problem_of(scene: Scene, ours: dict[str, Any]) -> str:
    """Return what is wrong with our run of a scene, or nothing."""
    if scene.preempts and ours["preemptions"] == 0:
        return "nothing was preempted"
    if not scene.preempts and ours["cached_tokens"][1] == 0:
        return "no prefix was hit"
    if scene.drafts and ours["steps_with_drafts"] == 0:
        return "no drafts were verified"
    return ""


if __name__ == "__main__":
    sys.exit(main())
