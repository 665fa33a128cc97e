"""Time decode, with its plan and its combine launch, in CUDA graphs; check it against float32."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.planning.families import portable_variant
from paged_mla_optimized.runtime.device import device_record
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tools.bench import peers
from paged_mla_optimized.tools.bench.cases import GROUPS, Case
from paged_mla_optimized.tools.bench.problem import Tensors, build, error, plan
from paged_mla_optimized.tools.bench.report import header, line, plot, summary, write
from paged_mla_optimized.tools.bench.table import check_options
from paged_mla_optimized.tools.bench.timing import Launch, alone, ceilings, in_turns

_RIVALS = ("flashmla", "fa3")


def measure(case: Case, builders: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Return the results of one case, with this package's kernels and the others in `builders`.

    Each output is first checked against float32. `limits` are the :func:`ceilings` of the device.
    """
    tensors = build(case)
    launches, worst = _ours(tensors)
    for name, builder in builders.items():
        launch = builder(tensors)
        if launch is not None:
            error(tensors, launch())
            launches[name] = launch
    row: dict[str, Any] = {"case": case.name, "error": worst}
    row |= alone(launches)
    row["tflops"] = case.flops / row["us"] / 1e6
    row["gbs"] = case.bytes / row["us"] / 1e3
    row["intensity"] = case.flops / case.bytes
    floor = max(case.bytes / limits["copy_gbs"] / 1e3, case.flops / limits["matmul_tflops"] / 1e6)
    row["of_floor"] = floor / row["us"]
    rivals = [name for name in _RIVALS if name in launches]
    if rivals:
        row["ratio"] = min(row[name] for name in rivals) / row["us"]
        row["in_turns"] = in_turns({name: launches[name] for name in ("us", *rivals)})
        best = min(row["in_turns"][name] for name in rivals)
        row["ratio_in_turns"] = best / row["in_turns"]["us"]
    return row


def _ours(tensors: Tensors) -> tuple[dict[str, Launch], float]:
    """Return this package's launches, which have been checked, and the error of the first one.

    The launches are attention without the plan, attention with the plan, the main kernel alone, and
    the portable kernel with its combine launch.
    """
    cache = LatentCache(tensors.config.cache_format, tensors.cache)
    queries = Queries(tensors.q_nope, tensors.q_pe)
    core = Core(tensors.config, "cuda")
    portable = portable_variant(core.demand, tensors.case.query_len)
    without_gluon = Core(tensors.config, "cuda", variant=portable)

    out = tensors.q_nope.new_empty(tensors.q_nope.shape)
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)

    def attend(core: Core) -> None:
        core.attend(core.plan, queries, cache, Answer(out, lse))

    def step() -> None:
        plan(core, tensors)
        attend(core)

    errors = []
    for each in (core, without_gluon):
        plan(each, tensors)
        attend(each)
        errors.append(error(tensors, out.view(*tensors.q.shape[:3], -1)))
    return {
        "us": lambda: attend(core),
        "plan_us": step,
        "main_us": lambda: core.attention.attend(core.plan, queries, cache, Answer(out, lse)),
        "portable_us": lambda: attend(without_gluon),
    }, errors[0]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, with the chosen cases."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench", description=__doc__)
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)} (default: main)"
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="only cases with these names")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder of other kernels")
    parser.add_argument(
        "--out", type=Path, metavar="STEM", help="write STEM.json, STEM.md and the plot STEM.png"
    )
    options = parser.parse_args(arguments)
    unknown = [group for group in options.groups if group not in GROUPS]
    if unknown:
        parser.error(f"groups: got {unknown}; allowed: {', '.join(GROUPS)}")
    check_options(parser, options)
    groups = dict.fromkeys(options.groups or ["main"])
    cases = dict.fromkeys(case for group in groups for case in GROUPS[group])
    options.cases = [case for case in cases if re.search(options.only, case.name)]
    if not options.cases:
        parser.error(
            f"--only: got {options.only!r}; allowed: a regular expression that matches a case of "
            f"{', '.join(groups)}"
        )
    return options


def main() -> int:
    """Run the chosen cases; return the exit status."""
    options = parse()
    if not torch.cuda.is_available():
        print(
            "paged_mla_optimized.tools.bench: torch finds no GPU; run it on a machine with one",
            file=sys.stderr,
        )
        return 2
    limits = ceilings()
    facts = device_record() | limits
    print(facts, flush=True)
    builders = peers.load(options.peers)
    rows: list[dict[str, Any]] = []
    names = list(builders)
    print(header(names))
    for case in options.cases:
        rows.append(measure(case, builders, limits))
        print(line(rows[-1], names), flush=True)
        torch.cuda.empty_cache()
        if options.out:
            write(options.out, facts, rows, names)
    if options.out:
        plot(options.out, facts, rows)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
