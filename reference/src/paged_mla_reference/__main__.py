"""``python -m paged_mla_reference simulate``: a serving engine, to look at and to replay."""

from __future__ import annotations

import argparse
import sys

from paged_mla_reference.simulator import command


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return 0 when it could."""
    parser = argparse.ArgumentParser(prog="paged_mla_reference", description=__doc__)
    commands = parser.add_subparsers(required=True)
    simulate = commands.add_parser("simulate", help=command.__doc__)
    command.add_arguments(simulate)
    try:
        print(command.simulate(parser.parse_args(arguments)))
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
