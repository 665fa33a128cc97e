"""Measure the rows of a table one after the other, and print and write each at once."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from paged_mla_optimized.runtime.device import device_record
from paged_mla_shared.folders import with_ending


class Named(Protocol):
    """An object with the name of a row."""

    @property
    def name(self) -> str:
        """The first cell."""


Step = TypeVar("Step", bound=Named)


def head_of(columns: Sequence[str]) -> str:
    """Return the head of a Markdown table, with the line below it."""
    return f"{row_of(columns)}\n|{'---|' * len(columns)}"


def row_of(cells: Iterable[str]) -> str:
    """Return one row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def options_of(parser: argparse.ArgumentParser, steps: Iterable[Named]) -> argparse.Namespace:
    """Add the options ``--only`` and ``--out`` to a parser, and return the checked options.

    The process ends with an error if ``--only`` matches none of the `steps`, or without a GPU.
    """
    parser.add_argument("--only", default="", metavar="REGEX", help="only rows with these names")
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.json and STEM.md")
    options = parser.parse_args()
    check_options(parser, options)
    if not any(re.search(options.only, step.name) for step in steps):
        parser.error(
            f"--only: got {options.only!r}; allowed: a regular expression that matches the name "
            "of a row"
        )
    if torch.cuda.device_count() == 0:
        parser.error("torch finds no GPU; run this command on a machine with one")
    return options


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process with an error if an expression or a folder in the options is invalid."""
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only: got {options.only!r}, {error}; allowed: a regular expression")
    peers = getattr(options, "peers", None)
    if peers and not peers.is_dir():
        parser.error(f"--peers: got {peers}; allowed: an existing folder")
    if options.out and not options.out.parent.is_dir():
        parser.error(f"--out: got {options.out}; allowed: a name in an existing folder")


def run(
    steps: Iterable[Step],
    measure: Callable[[Step], dict[str, Any]],
    line: Callable[[dict[str, Any]], str],
    header: str,
    options: argparse.Namespace,
) -> None:
    """Measure the chosen steps; print each row, and write all rows so far after each."""
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
                with_ending(options.out, ".json").write_text(measured)
                with_ending(options.out, ".md").write_text("\n".join(lines) + "\n")
