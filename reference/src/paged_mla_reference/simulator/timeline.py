"""An HTML page of a schedule: rows, graph shapes, blocks and hits of each step."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.scenario import Scenario, drive
from paged_mla_reference.simulator.step import Kind, Step
from paged_mla_shared.documents import in_script
from paged_mla_shared.typed import build

TEMPLATE = Path(__file__).with_name("timeline.html")
_FREE, _CACHED, _FIRST_OWNER = 0, 1, 2
_PLACE = re.compile(r"trace (\S+), step (\d{1,9}), rank \d+(?:, token (\d{1,9}))?")


@dataclass(frozen=True)
class Mark:
    """The place of a wrong output.

    Parameters
    ----------
    step : int
        Engine step.
    token : int or None
        Query token of the step; ``None`` if the message names no token.
    message : str
    """

    step: int
    token: int | None
    message: str


class Timeline:
    """Recorder of an engine's steps; it stores the changes from step to step.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[str, int] = {}
        self._requests: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._blocks: dict[int, int] = {}  # owner codes of blocks that were not always free
        self._again: set[int] = set()  # blocks to check again after the next step

    def watch(self, step: Step) -> None:
        """Record the engine's newest step."""
        rows = [
            [self._lane(row.request.id, len(row.request.prompt), len(row.request.output)),
             list(Kind).index(row.kind), row.context_len, row.query_len, list(row.blocks)]
            for row in step.rows
        ]  # fmt: skip
        self._steps.append(
            {
                "mask": str(step.mask),
                "rows": rows,
                "num_rows": step.num_rows,
                "num_tokens": step.num_tokens,
                "changed": self._changed(step),
                "waiting": len(self._engine.waiting),
                "hit": self._engine.hit_tokens,
                "prompt": self._engine.prompt_tokens,
            }
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the recorded data, for the page."""
        return {
            "kinds": [str(kind) for kind in Kind],
            "requests": self._requests,
            "steps": self._steps,
            "num_blocks": self._engine.config.num_blocks,
            "span": self._engine.config.span,
        }

    def _lane(self, request_id: str, prompt: int, output: int) -> int:
        """Return the number of a request; add a new request to the recorded requests."""
        if request_id not in self._lanes:
            self._lanes[request_id] = len(self._lanes)
            self._requests.append({"id": request_id, "prompt": prompt, "output": output})
        return self._lanes[request_id]

    def _changed(self, step: Step) -> list[list[int]]:
        """Return each block with a new owner: no owner, the prefix cache, or a request.

        The function checks only blocks that the pool touched in this step or in the step before,
        because a row whose request has ended is still in its step. It also checks shared blocks,
        because their first request depends on the order of rows.
        """
        pool = self._engine.pool
        now = pool.take_changed()
        touched = now | self._again
        owners = self._owners(step, touched)
        changed = []
        for block in sorted(touched):
            new = owners.get(block, _CACHED if pool.is_cached(block) else _FREE)
            if new != self._blocks.get(block, _FREE):
                self._blocks[block] = new
                changed.append([block, new])
        self._again = now | {block for block in touched if pool.references(block) > 1}
        return changed

    def _owners(self, step: Step, touched: set[int]) -> dict[int, int]:
        """Return the owner code of each touched block in use: its first request and its sharing."""
        pool = self._engine.pool
        users = [(row.request.id, row.blocks) for row in step.rows]
        users += [(seq.request.id, tuple(seq.blocks)) for seq in self._engine.running]
        owners = {}
        for request_id, owned in reversed(users):
            for block in touched.intersection(owned):
                if references := pool.references(block):
                    lane = self._lanes[request_id]
                    owners[block] = _FIRST_OWNER + 2 * lane + (references > 1)
        return owners


def timeline_of(scenario: Scenario) -> dict[str, Any]:
    """Run a scenario and return its timeline, with the table of reached situations."""
    engine = Engine(scenario.config)
    timeline = Timeline(engine)
    for step in drive(engine, scenario.requests):
        timeline.watch(step)
    return {
        "name": scenario.name,
        "why": scenario.why,
        "config": {name: str(value) for name, value in asdict(scenario.config).items()},
        "coverage": engine.coverage.table(),
        **timeline.as_dict(),
    }


def mark_in_report(report: dict[str, Any], name: str, where: str = "report") -> Mark | None:
    """Return the place at which trace `name` failed in a conformance report, or ``None``.

    Raises
    ------
    InvalidArgument
        `report` is not a report; the message begins with `where`.
    """
    results = report.get("results")
    for result in build(tuple[dict[str, Any], ...], results, f"{where}: results"):
        build(str, result.get("test"), f"{where}: test")
        message: str = build(str, result.get("message", ""), f"{where}: message")
        found = _PLACE.search(message)
        if found and found[1] == name:
            token = None if found[3] is None else int(found[3])
            line = next(line for line in message.splitlines() if found[0] in line)
            rule = max(line.rfind("[", 0, line.index(found[0])), 0)
            return Mark(int(found[2]), token, line[rule:].strip())
    return None


def render(timeline: dict[str, Any], mark: Mark | None = None) -> str:
    """Return the HTML page of a timeline; the page needs no other file."""
    data = {**timeline, "mark": None if mark is None else asdict(mark)}
    return TEMPLATE.read_text().replace('"__TIMELINE__"', in_script(data))
