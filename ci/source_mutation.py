"""Change the sources one token at a time: a test must fail, or the change must be excused.

    python -m ci.source_mutation                    # every file of source_mutation.toml
    python -m ci.source_mutation --only merge.py    # files whose path ends in merge.py
    python -m ci.source_mutation --page             # also write the results to the page

cosmic-ray makes the changes. A change survives if no test fails. A survivor without an excuse in
``source_mutation.toml`` is an error, and an excuse without a survivor is an error too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import tomllib
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.fork_tests import fails_a_test, settle
from ci.mutate import Change, changes_of
from ci.packages import ROOT

PLAN = ROOT / "ci" / "source_mutation.toml"
PAGE = ROOT / "conformance" / "docs" / "source-mutation.md"
LIMIT_SECONDS = 600  # processor time of one run of pytest without a change
SLOWER = 3  # tests of a changed file may take this many times as long, plus 10 s

Key = tuple[str, str, str]  # file, line as it was, line as it becomes


@dataclass(frozen=True)
class Target:
    """One file of the plan.

    Parameters
    ----------
    file : str
    tests : list of list of str
        Arguments of pytest. The commands run in order until one fails.
    one_in : int
        One in this many changes is tried. The text of a change decides, so that edits elsewhere in
        the file do not affect the choice.
    """

    file: str
    tests: list[list[str]]
    one_in: int = 1


@dataclass(frozen=True)
class Result:
    """The results of the changes of a file."""

    made: int
    tried: int
    seconds: int
    survivors: list[list[str]]  # line as it was, line as it becomes

    def keys(self, file: str) -> list[Key]:
        """Return the keys of the survivors, as excuses have them."""
        return [(file, was, becomes) for was, becomes in self.survivors]


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every survivor has an excuse and every excuse has a survivor, otherwise 1."""
    parser = argparse.ArgumentParser(prog="ci.source_mutation", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="SUFFIX", help="only files whose path ends in SUFFIX"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--page", action="store_true", help="write the page")
    options = parser.parse_args(arguments)
    plan = tomllib.loads(PLAN.read_text())
    every = targets_of(plan)
    targets = [target for target in every if target.file.endswith(options.only)]
    if not targets:
        parser.error(f"no file of the plan ends in {options.only!r}")
    excuses = excuses_of(plan)
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, spawn, settle, (folder,)) as pool:
            for target in targets:
                results[target.file] = judge(target, plan["seed"], pool, excuses)
                if options.page:
                    write_page(PAGE, every, results, plan)
    faults = faults_of(results, excuses)
    print("\n".join(faults))
    print(f"{sum(r.seconds for r in results.values())} s of processor time, {len(faults)} faults")
    return 1 if faults else 0


def targets_of(plan: dict[str, Any]) -> list[Target]:
    """Return every file of the plan, with its own tests before those of its group."""
    found = []
    for group in plan["group"]:
        for name, own in group["files"].items():
            tests = [[f"{group['tests_folder']}/{test}" for test in own]]
            tests += [command.split() for command in group["then"]]
            found.append(Target(f"{group['folder']}/{name}", tests, group.get("one_in", 1)))
    return found


def excuses_of(plan: dict[str, Any]) -> dict[Key, str]:
    """Return the reason of each excuse, by the key of its change."""
    return {(e["file"], e["was"], e["becomes"]): e["why"] for e in plan.get("excuse", [])}


def faults_of(results: dict[str, Result], excuses: dict[Key, str]) -> list[str]:
    """Return a line for each survivor without an excuse and each excuse without a survivor."""
    keys = [key for file, result in results.items() for key in result.keys(file)]
    found = [f"survives: {' | '.join(key)}" for key in keys if key not in excuses]
    idle = [key for key in excuses if key[0] in results and key not in keys]
    return found + [f"excused, but no survivor: {' | '.join(key)}" for key in idle]


def judge(target: Target, seed: int, pool: ProcessPoolExecutor, excuses: dict[Key, str]) -> Result:
    """Try the changes of a target; print the survivors and counts, and return the result."""
    source = (ROOT / target.file).read_text()
    changes = sorted(changes_of(target.file, source), key=lambda change: change.line)
    chosen = [change for change in changes if _draw(change, seed) % target.one_in == 0]
    most = [LIMIT_SECONDS] * len(target.tests)
    fails, usual = pool.submit(fails_a_test, target.file, source, target.tests, most).result()
    if fails:
        raise SystemExit(f"{target.file}: its tests fail without any change")
    limits = [10 + round(SLOWER * seconds) for seconds in usual]
    work = [pool.submit(fails_a_test, c.file, c.source, target.tests, limits) for c in chosen]
    total, survivors = 0.0, []
    for change, (killed, seconds) in zip(chosen, (w.result() for w in work), strict=True):
        total += sum(seconds)
        if not killed:
            survivors.append([change.was, change.becomes])
            print(f"{change}\n    {excuses.get(change.key, 'SURVIVES')}", flush=True)
    result = Result(len(changes), len(chosen), round(total), survivors)
    print(f"{target.file}: {_counts(result)}, {result.seconds} s", flush=True)
    return result


def _counts(result: Result) -> str:
    survived = len(result.survivors)
    return f"{result.made} changes, {result.tried} tried, {survived} survived"


def _draw(change: Change, seed: int) -> int:
    return zlib.crc32(repr((seed, *change.key)).encode())


def load_results(page: Path) -> dict[str, Result]:
    """Return the results of the last runs by file, from the JSON file next to the page."""
    path = page.with_suffix(".json")
    found = json.loads(path.read_text()) if path.exists() else {}
    return {file: Result(**fields) for file, fields in found.items()}


def write_page(
    page: Path,
    targets: list[Target],
    results: dict[str, Result],
    plan: dict[str, Any],
) -> None:
    """Write the page and its JSON; files that were not tried keep the results of earlier runs."""
    merged = load_results(page) | results
    kept = {t.file: merged[t.file] for t in targets if t.file in merged}
    document = {file: vars(result) for file, result in kept.items()}
    page.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    untried = [target.file for target in targets if target.file not in kept]
    page.write_text(markdown(kept, untried, plan))


def markdown(results: dict[str, Result], untried: list[str], plan: dict[str, Any]) -> str:
    """Return the page with counts for each file, and every survivor with its excuse."""
    total = Result(
        sum(r.made for r in results.values()),
        sum(r.tried for r in results.values()),
        sum(r.seconds for r in results.values()),
        [line for r in results.values() for line in r.survivors],
    )
    excuses = excuses_of(plan)
    lines = [HEAD.format(seed=plan["seed"], measured=plan["measured"])]
    lines += [_row(f"`{file}`", result) for file, result in results.items()]
    lines += [_row("**all**", total)]
    lines += ["", "Not tried since they last changed:", ""] if untried else []
    lines += [f"* `{file}`" for file in untried]
    lines += ["", "## Survivors"]
    for file, result in results.items():
        lines += ["", f"### {file}"] if result.survivors else []
        for _, was, becomes in result.keys(file):
            lines += ["", "```diff", f"- {was}", f"+ {becomes}", "```", ""]
            lines += [excuses.get((file, was, becomes), "**No reason on file.**")]
    return "\n".join(lines) + "\n"


def _row(name: str, result: Result) -> str:
    survived = len(result.survivors)
    cells = (name, result.made, result.tried, result.tried - survived, survived, result.seconds)
    return f"| {' | '.join(map(str, cells))} |"


HEAD = """\
# Source mutation

This page lists the changes of the source that no test finds, with the reason of each. cosmic-ray
changes one token of one file at a time: an operator becomes its opposite or its neighbor, a number
increases or decreases by one, a condition is negated, or a loop has no iteration. Changes of
annotations do not count. A change is killed if a test fails, hangs or crashes. A change that
survives needs a reason in [source_mutation.toml](../../ci/source_mutation.toml); otherwise the
session fails. In a larger file one change in 8, 16 or 32 is tried; a checksum of the seed {seed}
and the change selects them. `nox -s source_mutation -- --page` writes this page.

The results are those of commit {measured}. Sources have changed since, so the counts and lines may
differ from those of the present sources.

| file | changes | tried | killed | survived, with a reason | s of processor time |
|---|---|---|---|---|---|"""


if __name__ == "__main__":
    sys.exit(main())
