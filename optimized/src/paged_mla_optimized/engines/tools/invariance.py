"""Whether an engine says the same of a prompt, to the last bit, whatever stands beside it."""

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
"""Of a prompt with what is generated: ``--tokens`` may be up to 192."""
MAX_TOKENS = 16_384
"""Of a step: prompts are never cut, and those that find no room begin beside rows that decode."""
ROWS = 16
LAYERS = 4
_COLUMNS = ["scene", "mode", "of each", "prompts that keep their bits", "others", "commit"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """An engine.

    Parameters
    ----------
    backend : str
    heads : int
    is_on : bool
        The engine's own mode, in which bits are not to depend on the batch.
    is_promised : bool
        This backend's rows keep their bits then: the exit status tells.
    arguments : dict
        Of the engine, beside those that all have.
    """

    backend: str
    heads: int = 16
    is_on: bool = True
    is_promised: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


Run: TypeAlias = Callable[[Path, Scene, Callable[[Ask], None]], None]
"""Makes an engine of a model and a scene, hands on how to ask it, and ends it."""


@dataclass(frozen=True)
class Command:
    """What is asked.

    Parameters
    ----------
    engine : str
        Package that is run; the command is ``engines.ENGINE.tools.invariance``.
    scenes : mapping
        By name, the slowest first.
    """

    engine: str
    scenes: Mapping[str, Scene]

    def main(self, doc: str | None, run: Run) -> int:
        """Run scenes side by side, or one of them in this process."""
        options = options_of(doc, self.scenes, jobs=12, folder=f"out/{self.engine}-invariance")
        if options.here:
            [name] = options.scenes
            run_scene(self.scenes[name], options.folder, name, options.tokens, run)
            return 0
        for name in options.scenes:  # once, not in each process
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
        print(f"do not keep what they promise: {', '.join(failed) or 'none'}")
        return 1 if failed else 0


def run_scene(scene: Scene, folder: Path, name: str, tokens: int, run: Run) -> None:
    """Run one scene in this process; write what was found after each of its mixes."""
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
    """Return ragged prompts of two tokens and more.

    vLLM has those of one token go over latents or over heads, as others beside them decide.
    """
    return [prompt for prompt in ragged_prompts(LONGEST) if len(prompt) > 1]


def mixes(count: int) -> dict[str, list[int]]:
    """Return in which numbers and orders so many prompts are asked at once."""
    whole = list(range(count))
    return {
        "together": whole,
        "reversed": whole[::-1],
        "half": whole[::2],
        "crowd": [*whole, *whole],  # more than there are rows: the last begin late
    }


def compared(ask: Ask, many: list[list[int]], tokens: int) -> Iterator[dict[str, Any]]:
    """Ask for each prompt alone; yield of each mix what does not say the same."""
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
    """Return what came of a scene in a line."""
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
    return f"of {lengths} tokens, from step {first} on, {most:.2g} nats where they part"


def page(scenes: dict[str, Result]) -> str:
    """Return the table of all scenes."""
    lines = [*places(scenes), "", head_of(_COLUMNS)]
    for name, scene in sorted(scenes.items()):
        found, mode = scene.get("mixes", []), "on" if scene["is_on"] else "off"
        parted = any(mix["others"] for mix in found)
        cells = [name, mode, str(scene.get("tokens", "-")), _kept(found) or told(scene)]
        lines.append(row_of([*cells, _others(found) if parted else "-", scene["facts"]["commit"]]))
    return "\n".join(lines) + "\n"
