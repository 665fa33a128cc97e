"""A table whose rows are measured one after the other, printed and written as they come."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from paged_mla_optimized.runtime.device import device_record


class Named(Protocol):
    """Whatever has the name of a row."""

    @property
    def name(self) -> str:
        """The first cell."""


Step = TypeVar("Step", bound=Named)


def head_of(columns: Sequence[str]) -> str:
    """Return the head of a Markdown table, and the rule below it."""
    return f"{row_of(columns)}\n|{'---|' * len(columns)}"


def row_of(cells: Iterable[str]) -> str:
    """Return one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def options_of(parser: argparse.ArgumentParser, steps: Iterable[Named]) -> argparse.Namespace:
    """Add what every table asks, ``--only`` and ``--out``; return what the command line says.

    Some of the `steps` are to be measured.
    """
    parser.add_argument("--only", default="", metavar="REGEX", help="of names of rows")
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    options = parser.parse_args()
    check_options(parser, options)
    if not any(re.search(options.only, step.name) for step in steps):
        parser.error(f"--only: got {options.only!r}, which no row's name matches")
    if torch.cuda.device_count() == 0:
        parser.error("torch finds no GPU")
    return options


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what would end a command once something has been timed."""
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only: got {options.only!r}, {error}; allowed: a regular expression")
    peers = getattr(options, "peers", None)
    if peers and not peers.is_dir():
        parser.error(f"--peers: got {peers}; allowed: a folder")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: got {options.out}; allowed: a name in a folder that is there")


def run(
    steps: Iterable[Step],
    measure: Callable[[Step], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
    header: str,
    options: argparse.Namespace,
) -> None:
    """Measure the chosen steps, and leave all of them so far behind each."""
    facts = device_record()
    lines = [str(facts), "", header]
    print(*lines, sep="\n", flush=True)
    rows = []
    for step in steps:
        if re.search(options.only, step.name):
            rows.append(measure(step))
            lines.append(line(rows[-1]))
            print(lines[-1], flush=True)
            torch.cuda.empty_cache()
            if options.out:
                measured = json.dumps({"facts": facts, "rows": rows})
                options.out.with_suffix(".json").write_text(measured)
                options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
