"""``paged-mla simulate``: run the schedule of a serving engine, draw it and save it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig, RowOrder
from paged_mla_reference.simulator.generated import generated
from paged_mla_reference.simulator.request_log import load_log
from paged_mla_reference.simulator.scenario import Scenario, load_scenario, save_scenario
from paged_mla_reference.simulator.scenarios import CORE, core_scenario
from paged_mla_reference.simulator.timeline import mark_in_report, render, timeline_of
from paged_mla_reference.simulator.trace import Trace, record, trace_of
from paged_mla_reference.simulator.trace_file import check_writable, save_trace
from paged_mla_reference.simulator.work import check_answers, check_arrays, check_page
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.documents import one_line, read_object
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.folders import check_files
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.options import OneLineParser, one_of, refuse_idle, whole
from paged_mla_shared.problem import Mask

_ABOUT = """\
Simulates a serving engine with a block pool, a prefix cache, chunked prefill, preemption and
drafts. The command prints how often the schedule reached each situation of the engine. The page
(--html) shows each step and the owner of each block.
"""
_EXAMPLE = "example: paged-mla simulate preemption --html out/preemption.html"
STANDARD = EngineConfig(
    block_size=64, num_blocks=4096, max_rows=64, token_budget=2048, max_chunk=512
)
_SIZES = ("block_size", "num_blocks", "max_rows", "token_budget", "max_chunk")
_ENGINE = (*_SIZES, "order", "chain", "tree", "buckets", "steps_per_unit")


def main(arguments: list[str] | None = None) -> int:
    """Run a schedule; return 0, or 2 if a file or an option is wrong."""
    options = _parser().parse_args(arguments)
    try:
        text = simulate(options)
    except (OSError, InvalidArgument) as error:
        print(f"paged-mla simulate: {one_line(error)}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="paged-mla simulate", description=_ABOUT, epilog=_EXAMPLE)
    source = parser.add_mutually_exclusive_group(required=True)
    names = [scenario.name for scenario in CORE]
    source.add_argument(
        "name",
        nargs="?",
        type=one_of(names),
        metavar="NAME",
        help=f"run a core scenario: {', '.join(names)}",
    )
    source.add_argument(
        "--scenario", type=Path, metavar="JSON", help="run a scenario or replay file"
    )
    source.add_argument("--generated", type=whole(0), metavar="SEED", help="run a random schedule")
    source.add_argument("--log", type=Path, metavar="JSONL", help="run a log of real traffic")

    engine = parser.add_argument_group("engine (only with --log)")
    for name in _SIZES:
        option, default = "--" + name.replace("_", "-"), getattr(STANDARD, name)
        engine.add_argument(option, type=whole(1), metavar="N", help=f"default: {default}")
    engine.add_argument(
        "--order",
        type=one_of([*map(str, RowOrder)]),
        metavar="NAME",
        help=f"order of the rows of a step: {', '.join(RowOrder)}",
    )
    drafts = engine.add_mutually_exclusive_group()
    drafts.add_argument("--chain", type=whole(1), metavar="DEPTH", help="verify chains of drafts")
    drafts.add_argument(
        "--tree", type=_tree, metavar="DEPTHxBRANCHES", help="verify trees of drafts"
    )
    engine.add_argument(
        "--buckets", type=_buckets, metavar="1,2,4", help="numbers of rows of captured graphs"
    )
    engine.add_argument(
        "--steps-per-unit",
        type=float,
        metavar="X",
        help="engine steps per time unit of the log (default: 1)",
    )

    result = parser.add_argument_group("results")
    result.add_argument("--html", type=Path, help="write the timeline as an HTML page")
    result.add_argument(
        "--report",
        type=Path,
        metavar="JSON",
        help="mark on the page the token at which a test of this conformance report failed",
    )
    result.add_argument(
        "--save", type=Path, metavar="JSON", help="write the scenario, for --scenario"
    )
    result.add_argument(
        "--trace", type=Path, metavar="NPZ", help="write every batch with its expected output"
    )
    result.add_argument(
        "--dims",
        type=one_of(PRESETS),
        metavar="NAME",
        help=f"dims of the model for --trace: {', '.join(PRESETS)} (default: small)",
    )
    dtypes = sorted(PLAIN_FORMAT_OF_DTYPE)
    result.add_argument(
        "--dtype",
        type=one_of(dtypes),
        metavar="NAME",
        help=f"dtype of the model for --trace: {', '.join(dtypes)} (default: float32)",
    )
    return parser


def simulate(options: argparse.Namespace) -> str:
    """Run the schedule of the options and write its files; return a summary with coverage.

    Raises
    ------
    InvalidArgument
        A file or a value is not valid, a file cannot be read or written, the schedule is too much
        work, or an option has no effect together with the other options.
    """
    if options.log is None:
        refuse_idle(options, _ENGINE, "--log")
    if options.html is None:
        refuse_idle(options, ["report"], "--html")
    if options.trace is None:
        refuse_idle(options, ["dims", "dtype"], "--trace")
    check_files(html=options.html, save=options.save, trace=options.trace)
    scenario = _scenario(options)
    mark = None
    if options.report:
        mark = mark_in_report(read_object(options.report), scenario.name, str(options.report))
    timeline = timeline_of(scenario)
    tokens = sum(row[3] for step in timeline["steps"] for row in step["rows"])
    dims, dtype = PRESETS[options.dims or "small"], options.dtype or "float32"
    trace = trace_of(scenario, dims, dtype) if options.trace else None
    _check_results(timeline["steps"], trace, has_page=options.html is not None)
    written: list[Path] = []
    if options.html:
        options.html.write_text(render(timeline, mark))
        written.append(options.html)
    if options.save:
        save_scenario(scenario, options.save)
        written.append(options.save)
    if trace is not None:
        save_trace(trace, record(scenario, dims, dtype), options.trace)
        written.append(options.trace)
    lines = [
        one_line(f"{scenario.name}: {scenario.why}"),
        f"{len(timeline['steps'])} steps, {len(timeline['requests'])} requests, {tokens} tokens",
        timeline["coverage"],
        *(one_line(f"wrote {path}") for path in written),
    ]
    if options.report and mark is None:
        text = f"{options.report} has no failing step of {scenario.name}, so nothing is marked"
        lines.append(one_line(text))
    return "\n".join(lines)


def _check_results(steps: list[dict[str, Any]], trace: Trace | None, *, has_page: bool) -> None:
    """Check, before writing, that the page and the trace are not too large.

    The outputs of the trace must also be known.
    """
    if has_page:
        check_page(sum(len(blocks) for step in steps for *_, blocks in step["rows"]))
    if trace is None:
        return
    check_writable(trace)
    dims, pairs = trace.problems[Mask.CAUSAL].dims, 0
    for number, step in enumerate(steps):
        check_arrays(
            number,
            dims,
            world=trace.world,
            num_tokens=step["num_tokens"],
            num_rows=step["num_rows"],
            blocks=(blocks for *_, blocks in step["rows"]),
        )
        pairs += sum(queries * (context + queries) for _, _, context, queries, _ in step["rows"])
    check_answers(pairs * trace.world, len(steps) * trace.world, dims)


def _scenario(options: argparse.Namespace) -> Scenario:
    if options.name:
        return core_scenario(options.name)
    if options.scenario:
        return load_scenario(options.scenario)
    if options.generated is not None:
        return generated(options.generated)
    per_unit = 1.0 if options.steps_per_unit is None else options.steps_per_unit
    requests, config = load_log(options.log, per_unit), _config(options)
    try:
        why = f"traffic of {options.log}"
        return Scenario(name=options.log.stem, why=why, config=config, requests=requests)
    except InvalidArgument as error:
        raise error.inside(str(options.log)) from None


def _config(options: argparse.Namespace) -> EngineConfig:
    drafts = options.tree
    if options.chain is not None:
        drafts = Drafts(kind=DraftKind.CHAIN, depth=options.chain)
    asked = {name: getattr(options, name) for name in (*_SIZES, "buckets")}
    asked["order"] = None if options.order is None else RowOrder(options.order)
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(STANDARD, drafts=drafts, **given)


def _tree(text: str) -> Drafts:
    try:
        depth, branches = map(int, text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; allowed: two numbers, such as 3x2"
        ) from error
    return Drafts(kind=DraftKind.TREE, depth=depth, branches=branches)


def _buckets(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; allowed: numbers, such as 1,2,4"
        ) from error
