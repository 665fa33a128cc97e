"""Check whether an engine's logprobs for a prompt are bit-equal in every batch."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from paged_mla_optimized.engines.tools.apart import options_of, run_scenes
from paged_mla_optimized.engines.tools.follow import between
from paged_mla_optimized.engines.tools.history import Ask
from paged_mla_optimized.engines.tools.history import prompts as ragged_prompts
from paged_mla_optimized.engines.tools.model import build_model
from paged_mla_optimized.engines.tools.report import Result, add, places
from paged_mla_optimized.tools.bench.table import head_of, row_of

LONGEST = 8000
MAX_LEN = 8192
"""The largest length of a prompt with its generated tokens, so ``--tokens`` may be up to 192."""
MAX_TOKENS = 16_384
"""The largest number of tokens in a step. Prompts are never split. A prompt that does not fit a
step starts in a later step, together with rows that decode."""
ROWS = 16
LAYERS = 4
_COLUMNS = ["scene", "mode", "of each", "prompts that keep their bits", "others", "commit"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A workload: the configuration of an engine.

    Parameters
    ----------
    backend : str
    heads : int
    is_on : bool
        Whether the engine's batch-invariant mode is on.
    is_promised : bool
        Whether the bits must not depend on the batch. If they do, the exit status is 1.
    arguments : dict
        Arguments of the engine in addition to the arguments of all workloads.
    """

    backend: str
    heads: int = 16
    is_on: bool = True
    is_promised: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


Run: TypeAlias = Callable[[Path, Scene, Callable[[Ask], None]], None]
"""Creates an engine for a model and a workload, passes a function that generates, and ends it."""


@dataclass(frozen=True)
class Command:
    """A command that compares the logprobs of an engine.

    Parameters
    ----------
    engine : str
        The package of the engine; the command is ``engines.ENGINE.tools.invariance``.
    scenes : mapping
        The workloads by name, the slowest first.
    """

    engine: str
    scenes: Mapping[str, Scene]

    def main(self, doc: str | None, run: Run) -> int:
        """Run workloads in parallel, or one in this process; return 1 if a required one fails."""
        options = options_of(doc, self.scenes, jobs=12, folder=f"out/{self.engine}-invariance")
        if options.here:
            [name] = options.scenes
            run_scene(self.scenes[name], options.folder, name, options.tokens, run)
            return 0
        for name in options.scenes:  # here, so that the processes do not write the same model
            _model(options.folder, self.scenes[name])
        module = f"paged_mla_optimized.engines.{self.engine}.tools.invariance"
        found = {
            name: {"is_on": self.scenes[name].is_on} | result
            for name, result in zip(options.scenes, run_scenes(module, options), strict=True)
        }
        for name, result in found.items():
            print(f"{name}: {told(result)}", flush=True)
        if options.out:
            add(options.out, self.engine, found, page)
        failed = [n for n in found if self.scenes[n].is_promised and not keeps(found[n])]
        print(f"not batch-invariant as required: {', '.join(failed) or 'none'}")
        return 1 if failed else 0


def run_scene(scene: Scene, folder: Path, name: str, tokens: int, run: Run) -> None:
    """Run one workload in this process; write its result after each mix of prompts."""
    start, path = time.monotonic(), folder / f"{name}.json"
    found: Result = {"tokens": tokens, "mixes": []}

    def use(ask: Ask) -> None:
        for mix in compared(ask, prompts(), tokens):
            found["mixes"].append(mix)
            found["seconds"] = round(time.monotonic() - start, 1)
            path.write_text(json.dumps(found, indent=1))

    try:
        run(_model(folder, scene), scene, use)
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"
        path.write_text(json.dumps(found, indent=1))


def _model(folder: Path, scene: Scene) -> Path:
    return build_model(folder, heads=scene.heads, layers=LAYERS)


def prompts() -> list[list[int]]:
    """Return prompts of different lengths of at least two tokens.

    With vLLM the other rows of a step decide whether a prompt of one token attends over latents or
    over per-head keys and values, so these prompts are left out.
    """
    return [prompt for prompt in ragged_prompts(LONGEST) if len(prompt) > 1]


def mixes(count: int) -> dict[str, list[int]]:
    """Return the batches of `count` prompts: the name and the numbers of the prompts of each."""
    whole = list(range(count))
    return {
        "together": whole,
        "reversed": whole[::-1],
        "half": whole[::2],
        "crowd": [*whole, *whole],  # more prompts than rows, so the last start later
    }


def compared(ask: Ask, many: list[list[int]], tokens: int) -> Iterator[dict[str, Any]]:
    """Generate for each prompt alone and in each mix; yield the differences of each mix.

    Parameters
    ----------
    ask : callable
    many : list of list of int
        The prompts.
    tokens : int
        The number of tokens to generate for each prompt.

    Yields
    ------
    dict
        The name of the mix, the number of its prompts, and for each prompt whose tokens or logprobs
        differ its length, the first step that differs, and the largest difference there.
    """
    alone = [ask([prompt], [tokens])[0][0] for prompt in many]
    for name, order in mixes(len(many)).items():
        answers, _ = ask([many[i] for i in order], [tokens] * len(order))
        others = []
        for i, answer in zip(order, answers, strict=True):
            steps = range(tokens)
            step = next((s for s in steps if answer[s] != alone[i][s]), None)
            if step is not None:
                one, other = alone[i][step][1], answer[step][1]
                shared = one.keys() & other
                apart = max((between(one, other, t) for t in shared), default=math.inf)
                others.append({"length": len(many[i]), "step": step, "nats": apart})
        yield {"mix": name, "prompts": len(order), "others": others}


def keeps(result: Result) -> bool:
    """Return whether every prompt of every mix kept its bits."""
    found = result.get("mixes", [])
    return len(found) == len(mixes(0)) and not any(mix["others"] for mix in found)


def told(result: Result) -> str:
    """Return the result of a workload as one line."""
    found, error = result.get("mixes", []), result.get("error")
    said = [_kept(found)] if found else []
    said += [_others(found)] if any(mix["others"] for mix in found) else []
    said += [f"failed: {error.splitlines()[0][:150]}"] if error else []
    return "; ".join(said)


def _kept(found: list[dict[str, Any]]) -> str:
    counts = [(m["mix"], m["prompts"] - len(m["others"]), m["prompts"]) for m in found]
    return ", ".join(f"{name} {kept} of {count}" for name, kept, count in counts)


def _others(found: list[dict[str, Any]]) -> str:
    others = [other for mix in found for other in mix["others"]]
    first = min(other["step"] for other in others)
    most = max(other["nats"] for other in others)
    lengths = ", ".join(map(str, sorted({other["length"] for other in others})))
    return f"prompts of {lengths} tokens differ, from step {first} on, by up to {most:.2g} nats"


def page(scenes: dict[str, Result]) -> str:
    """Return the page with the table of all workloads."""
    lines = [*places(scenes), "", head_of(_COLUMNS)]
    for name, scene in sorted(scenes.items()):
        found, mode = scene.get("mixes", []), "on" if scene["is_on"] else "off"
        parted = any(mix["others"] for mix in found)
        cells = [name, mode, str(scene.get("tokens", "-")), _kept(found) or told(scene)]
        lines.append(row_of([*cells, _others(found) if parted else "-", scene["facts"]["commit"]]))
    return "\n".join(lines) + "\n"
