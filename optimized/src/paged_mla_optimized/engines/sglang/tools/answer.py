"""Run one engine of ``check`` in this process.

Each engine has its own process, because SGLang ends a process whose engine fails. Without
``--backend`` the engine generates a history. With ``--backend`` it follows a history, which another
process may still be generating while this engine is created. The numbers are written to
``FOLDER/NAME.json`` and the logprobs to ``FOLDER/NAME.pickle``.
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
    """Run the engine that the command line describes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("name")
    parser.add_argument("--scene", choices=EVERY_SCENE, required=True)
    parser.add_argument("--backend")
    parser.add_argument("--history", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per prompt")
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
    """Write a file for which other processes wait; they never see a part of it."""
    part = path.with_suffix(".part")
    part.write_bytes(data)
    part.replace(path)


def wait_for(path: Path) -> Any:
    """Wait for a pickle and return its object.

    Raises
    ------
    RuntimeError
        The file is empty, because the process of the history failed.
    """
    while not path.exists():
        time.sleep(0.1)
    data = path.read_bytes()
    if not data:
        raise RuntimeError(f"there is no history, because its engine failed; see {path.stem}.log")
    return pickle.loads(data)


def models(scene: Scene, folder: Path) -> tuple[Path, Path]:
    """Return the folders of a workload's model and of its draft model."""
    drafts = scene.has_draft_model
    return build_models(folder, heads=scene.heads, layers=_LAYERS, drafts=drafts)


def given(scene: Scene, backend: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of a workload's engine."""
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
        mem_fraction_static=0.6,  # the pool is smaller; other engines need memory too
        sleep_on_idle=True,  # leaves the processors to the engine that generates the history
        **more,
    )


if __name__ == "__main__":
    main()
