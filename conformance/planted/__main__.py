"""Put the planted bugs to the suite, and what survives to the search."""

from __future__ import annotations

import argparse
import sys

from planted.finding import Finding
from planted.sets import BUGS, SETS
from planted.trial import ask_search, ask_suite


def main() -> int:
    """Ask for every bug named; return 0 when each was caught."""
    parser = argparse.ArgumentParser(prog="planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs (default: all)")
    parser.add_argument("--set", choices=[*SETS, "all"], default="all", help="of bugs")
    parser.add_argument("--fuzz-minutes", type=float, default=1.0, help="of search for a survivor")
    options = parser.parse_args()
    bugs = SETS.get(options.set, BUGS)
    unknown = sorted(set(options.names) - set(bugs))
    if unknown:
        parser.error(f"names: got {', '.join(unknown)}; allowed: {', '.join(bugs)}")
    if options.fuzz_minutes < 0:
        parser.error(f"--fuzz-minutes: got {options.fuzz_minutes}; allowed: >= 0")
    wrong = ask_suite("planted.torch_backend:create")
    if wrong:
        print(f"the right backend fails {wrong.by}: {wrong.said}")
        return 1
    findings = []
    for name in options.names or bugs:
        findings.append(_ask(name, options.fuzz_minutes))
        print(findings[-1].line, flush=True)
    survivors = [f.name for f in findings if not (f.by_suite or f.by_search)]
    print(f"{len(findings)} bugs; {len(survivors)} survive: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


def _ask(name: str, minutes: float) -> Finding:
    factory = f"planted.sets:{name}"
    by_suite = ask_suite(factory)
    by_search = None if by_suite or not minutes else ask_search(factory, minutes)
    return Finding(name=name, bug=BUGS[name], by_suite=by_suite, by_search=by_search)


if __name__ == "__main__":
    sys.exit(main())
