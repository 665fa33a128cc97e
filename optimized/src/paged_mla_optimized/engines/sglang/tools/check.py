"""Generate with SGLang through this backend and through SGLang's own, at the same histories.

    python -m paged_mla_optimized.engines.sglang.tools.check [SCENE ...] [--jobs 3] [--folder out]

Every scene of ``scenes.py`` runs in a process of its own. Its history is what the yardstick
generates, eagerly and with no drafts. Then each backend, in the scene's graphs, speculation and
cache, says what it thinks of every step: once with an empty prefix cache and once with hits. A line
has, for each of the two, the largest and the median difference of logprobs to the yardstick, the
steps whose likeliest token differs, and the largest gap there. All numbers are in
``FOLDER/SCENE.json``, also of every two passes of SGLang's own backends. The exit status is 1 if a
scene failed, or was further from the yardstick than any two of those are from each other, in all
scenes of the same model and cache.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.sglang.registration import NAME
from paged_mla_optimized.engines.sglang.tools.engine import arguments, ask, run_engine
from paged_mla_optimized.engines.sglang.tools.scenes import (
    CONTEXT_LEN,
    SCENES,
    YARDSTICK,
    Scene,
    prompts,
)
from paged_mla_optimized.engines.tools.apart import options_of, run_scenes
from paged_mla_optimized.engines.tools.history import begin, pairs, passes
from paged_mla_optimized.engines.tools.model import build_model
from paged_mla_optimized.engines.tools.report import judge, write

_MODULE = "paged_mla_optimized.engines.sglang.tools.check"
_LAYERS = 4
_ROWS = 16
_POOL = 65_536  # tokens


def main() -> int:
    """Run scenes, or one of them in this process."""
    options = options_of(__doc__, SCENES, jobs=3, folder="out/sglang")
    names = options.scenes
    if options.here:
        [name] = names
        run_scene(name, options.folder, options.tokens)
        return 0
    for scene in (SCENES[name] for name in names):  # once, not in each process
        build_model(options.folder, heads=scene.heads, layers=_LAYERS)
    results = dict(zip(names, run_scenes(_MODULE, options), strict=True))
    problems = judge(results, NAME, SCENES, problem_of)
    failed = [name for name, problem in problems.items() if problem]
    print(f"beyond or failed: {', '.join(failed) or 'none'}")
    if options.out:
        write(options.out, "sglang", NAME, results, problems)
    return 1 if failed else 0


def run_scene(name: str, folder: Path, tokens: int) -> None:
    """Run one scene in this process; write what was found after each of its engines."""
    scene = SCENES[name]
    model = build_model(folder, heads=scene.heads, layers=_LAYERS)
    plain = Scene(
        mode="eager",
        heads=scene.heads,
        page_size=scene.page_size,
        kv_cache_dtype=scene.kv_cache_dtype,
    )

    history, (numbers, logprobs) = run_engine(
        _given(model, plain, YARDSTICK),
        lambda engine: begin(partial(ask, engine), prompts(), tokens),
    )
    runs: list[dict[str, Any]] = [{"run": f"{YARDSTICK} again", **numbers}]
    own = {f"{YARDSTICK} again": logprobs}
    for backend in (NAME, *scene.peers):  # one that cannot start may end this process
        before = time.monotonic()
        try:
            numbers, logprobs = run_engine(
                _given(model, scene, backend),
                lambda engine: passes(partial(ask, engine), history, 2),
            )
            runs.append({"run": backend, **numbers})
            if backend != NAME:
                own[backend] = logprobs
        except Exception:  # the others are asked all the same
            runs.append({"run": backend, "error": traceback.format_exc()[-1500:]})
        runs[-1]["seconds"] = round(time.monotonic() - before, 1)
        found = {"runs": runs, "own": pairs(history, own)}
        (folder / f"{name}.json").write_text(json.dumps(found, indent=1))


def _given(model: Path, scene: Scene, backend: str) -> dict[str, Any]:
    """Return what the engine of a scene is made with."""
    more = dict(scene.arguments)
    if scene.has_draft_model:
        more["speculative_draft_model_path"] = str(model)
    return arguments(
        model,
        backend,
        scene.mode,
        page_size=scene.page_size,
        kv_cache_dtype=scene.kv_cache_dtype,
        context_length=CONTEXT_LEN,
        max_running_requests=_ROWS,
        cuda_graph_max_bs_decode=_ROWS,
        chunked_prefill_size=2048,
        max_total_tokens=_POOL,
        mem_fraction_static=0.3,  # the pool is smaller; engines run side by side
        **more,
    )


def problem_of(_scene: Scene, ours: dict[str, Any]) -> str:
    """Return what is wrong with our run of a scene, or nothing."""
    return "no prefix was hit" if ours["cached_tokens"][1] == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
