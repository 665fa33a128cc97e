"""One engine of ``check``, in a process of its own: SGLang ends a process whose engine fails.

It begins a history, where no backend is named, or follows one, which may still be in the making
while this engine is made. Numbers go to ``FOLDER/NAME.json``, logprobs to ``FOLDER/NAME.pickle``.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from paged_mla_optimized.engines.sglang.tools.engine import arguments, ask, run_engine
from paged_mla_optimized.engines.sglang.tools.scenes import (
    CONTEXT_LEN,
    EVERY_SCENE,
    YARDSTICK,
    Scene,
    prompts,
)
from paged_mla_optimized.engines.tools.history import begin, passes
from paged_mla_optimized.engines.tools.model import build_models

ROWS = 16
POOL = 65_536  # tokens
_LAYERS = 4


def main() -> None:
    """Ask one engine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("name")
    parser.add_argument("--scene", choices=EVERY_SCENE, required=True)
    parser.add_argument("--backend")
    parser.add_argument("--history", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="generated for each prompt")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    scene, folder, start = EVERY_SCENE[options.scene], options.folder, time.monotonic()

    def use(engine: Any) -> tuple[float, dict[str, Any], Any]:
        made, counts = time.monotonic() - start, Counter[str]()
        asked = partial(ask, engine, counts=counts)
        if options.backend:
            numbers, logprobs = passes(asked, wait_for(options.history)[0], 2)
            return made, numbers | counts, logprobs
        history, (numbers, logprobs) = begin(asked, prompts(), options.tokens)
        return made, numbers, (history, logprobs)

    set_up = scene if options.backend else scene.plain
    os.environ.update(set_up.environment)
    made, numbers, told = run_engine(given(set_up, options.backend or YARDSTICK, folder), use)
    give(folder / f"{options.name}.pickle", pickle.dumps(told))
    run = {
        "run": options.backend or f"{YARDSTICK} again",
        "made_seconds": round(made, 1),
        "seconds": round(time.monotonic() - start, 1),
    }
    (folder / f"{options.name}.json").write_text(json.dumps(run | numbers))


def give(path: Path, data: bytes) -> None:
    """Write a file that others wait for: whole, or not yet there."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def wait_for(path: Path) -> Any:
    """Return what a file will hold; it is empty where its process failed."""
    while not path.exists():
        time.sleep(0.1)
    data = path.read_bytes()
    if not data:
        raise RuntimeError(f"no history: see {path.stem}.log")
    return pickle.loads(data)


def models(scene: Scene, folder: Path) -> tuple[Path, Path]:
    """Return the model of a scene and the one that drafts for it."""
    drafts = scene.has_draft_model
    return build_models(folder, heads=scene.heads, layers=_LAYERS, drafts=drafts)


def given(scene: Scene, backend: str, folder: Path) -> dict[str, Any]:
    """Return what the engine of a scene is made with."""
    model, drafts = models(scene, folder)
    more = dict(scene.arguments)
    if scene.has_draft_model:
        more["speculative_draft_model_path"] = str(drafts)
    return arguments(
        model,
        backend,
        scene.mode,
        page_size=scene.page_size,
        kv_cache_dtype=scene.kv_cache_dtype,
        context_length=CONTEXT_LEN,
        max_running_requests=ROWS,
        cuda_graph_max_bs_decode=ROWS,
        chunked_prefill_size=2048,
        max_total_tokens=POOL,
        mem_fraction_static=0.6,  # the pool is smaller; engines beside this one take memory too
        sleep_on_idle=True,  # and processors, while a history is made
        **more,
    )


if __name__ == "__main__":
    main()
