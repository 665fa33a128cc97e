"""``python -m paged_mla_reference simulate``: run a schedule, look at it, save it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig, RowOrder
from paged_mla_reference.simulator.generated import generated
from paged_mla_reference.simulator.request_log import load_log
from paged_mla_reference.simulator.scenario import Scenario, load_scenario, save_scenario
from paged_mla_reference.simulator.scenarios import CORE, core_scenario
from paged_mla_reference.simulator.timeline import mark_in_report, render, timeline_of
from paged_mla_reference.simulator.trace import record, trace_of
from paged_mla_reference.simulator.trace_file import save_trace
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``simulate``."""
    source = parser.add_mutually_exclusive_group(required=True)
    names = [scenario.name for scenario in CORE]
    source.add_argument("name", nargs="?", choices=names, help="a core scenario")
    source.add_argument("--scenario", type=Path, metavar="JSON", help="a scenario or replay file")
    source.add_argument("--generated", type=int, metavar="SEED", help="a random schedule")
    source.add_argument("--log", type=Path, metavar="JSONL", help="a log of real traffic")

    engine = parser.add_argument_group("engine (with --log)")
    standard = EngineConfig(block_size=64, num_blocks=4096, max_rows=64, token_budget=2048)
    for name in ("block_size", "num_blocks", "max_rows", "token_budget"):
        option = "--" + name.replace("_", "-")
        engine.add_argument(option, type=int, default=getattr(standard, name))
    engine.add_argument("--max-chunk", type=int, default=512)
    engine.add_argument("--order", type=RowOrder, choices=list(RowOrder), default=standard.order)
    engine.add_argument("--chain", type=int, metavar="DEPTH", help="speculate with chains")
    engine.add_argument("--tree", metavar="DEPTHxBRANCHES", help="speculate with trees")
    engine.add_argument("--buckets", default="", metavar="1,2,4", help="rows of captured graphs")
    engine.add_argument("--steps-per-unit", type=float, default=1.0, help="of the log's times")

    result = parser.add_argument_group("results")
    result.add_argument("--html", type=Path, help="the timeline, one page")
    result.add_argument("--report", type=Path, metavar="JSON", help="mark its failing token")
    result.add_argument("--save", type=Path, metavar="JSON", help="the scenario, to replay it")
    result.add_argument("--trace", type=Path, metavar="NPZ", help="every batch with its answer")
    result.add_argument("--dims", choices=sorted(PRESETS), default="small", help="of --trace")
    result.add_argument("--dtype", choices=sorted(PLAIN_FORMAT_OF_DTYPE), default="float32")


def simulate(options: argparse.Namespace) -> str:
    """Run what the options ask for; return a summary with the coverage table."""
    scenario = _scenario(options)
    timeline = timeline_of(scenario)
    tokens = sum(row[3] for step in timeline["steps"] for row in step["rows"])
    written: list[Path] = []
    if options.html:
        report = json.loads(options.report.read_text()) if options.report else None
        mark = mark_in_report(report, scenario.name) if report else None
        options.html.write_text(render(timeline, mark))
        written.append(options.html)
    if options.save:
        save_scenario(scenario, options.save)
        written.append(options.save)
    if options.trace:
        dims = PRESETS[options.dims]
        steps = record(scenario, dims, options.dtype)
        save_trace(trace_of(scenario, dims, options.dtype), steps, options.trace)
        written.append(options.trace)
    lines = [
        f"{scenario.name}: {scenario.why}",
        f"{len(timeline['steps'])} steps, {len(timeline['requests'])} requests, {tokens} tokens",
        timeline["coverage"],
        *(f"wrote {path}" for path in written),
    ]
    return "\n".join(lines)


def _scenario(options: argparse.Namespace) -> Scenario:
    if options.name:
        return core_scenario(options.name)
    if options.scenario:
        return load_scenario(options.scenario)
    if options.generated is not None:
        return generated(options.generated)
    return Scenario(
        name=options.log.stem,
        why=f"traffic of {options.log}",
        config=_config(options),
        requests=tuple(load_log(options.log, options.steps_per_unit)),
    )


def _config(options: argparse.Namespace) -> EngineConfig:
    drafts = None
    if options.chain:
        drafts = Drafts(kind=DraftKind.CHAIN, depth=options.chain)
    elif options.tree:
        depth, branches = map(int, options.tree.split("x"))
        drafts = Drafts(kind=DraftKind.TREE, depth=depth, branches=branches)
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        max_rows=options.max_rows,
        token_budget=options.token_budget,
        max_chunk=options.max_chunk,
        order=options.order,
        drafts=drafts,
        buckets=tuple(int(size) for size in options.buckets.split(",") if size),
    )
