"""A serving engine to look at (``simulate``), and a step to be explained (``explain``)."""

from __future__ import annotations

import argparse
import os
import sys

from paged_mla_reference.debug import command as explaining
from paged_mla_reference.simulator import command as simulating


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return 0 when it could, and 1 where `explain` finds a broken rule."""
    parser = argparse.ArgumentParser(prog="paged_mla_reference", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    simulating.add_arguments(commands.add_parser("simulate", help=simulating.__doc__))
    explaining.add_arguments(commands.add_parser("explain", help=explaining.__doc__))
    options = parser.parse_args(arguments)
    try:
        if options.command == "explain":
            text, status = explaining.explain_file(options)
        else:
            text, status = simulating.simulate(options), 0
    except (OSError, ValueError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 2
    print(text)
    return status


def _to_a_pipe() -> int:
    """Run one command; where the reader of its output has gone, end as other programs do then."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        return 128 + 13  # what a shell tells of a program that SIGPIPE ended
    return status


if __name__ == "__main__":
    sys.exit(_to_a_pipe())
