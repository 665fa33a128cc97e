"""Run FlashMLA's own dense decode test with this project's kernels, on a Hopper GPU.

    python -m ci.flashmla PATH      # a checkout of https://github.com/deepseek-ai/FlashMLA

The test imports ``flash_mla``, which is ``paged_mla_optimized.drop_in.flash_mla`` here. The command
runs every case of the test's ``main`` in bfloat16 and in float16. It does not run the measurements
of time, because they search for FlashMLA's kernel by its name. The exit status is 0 if every case
of both dtypes ran and passed, 1 if a case failed or did not run, 2 for a wrong command line or
path, and 5 without a Hopper GPU, which the test needs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import Any

import torch

from ci.flashmla_cases import (
    DTYPES,
    TEST,
    Case,
    bytes_of,
    collect,
    is_lost,
    load,
    ordered,
    run,
)
from paged_mla_optimized.runtime.device import device_record
from paged_mla_shared.provenance import commit_of_checkout

WORKERS = 12
CANNOT_RUN_HERE = 5
_SMALL = 512 << 20  # the most bytes of a case that starts without a reservation
_SHOWN = 10  # the most failures that are printed
_NO_END = "the case did not end: its process crashed or was stopped"


class Memory:
    """Reservations of device memory by the large cases of all processes.

    Parameters
    ----------
    context : SpawnContext
    most : int
        The number of bytes that can be reserved. A case that needs more runs without another large
        case.
    """

    def __init__(self, context: SpawnContext, most: int) -> None:
        self._most = most
        self._taken = context.Value("q", 0, lock=False)
        self._changed = context.Condition()

    @contextmanager
    def take(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` are free, and reserve them until the end of the context."""
        if nbytes <= _SMALL:
            yield
            return
        nbytes = min(nbytes, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._taken.value + nbytes <= self._most)
            self._taken.value += nbytes
        try:
            yield
        finally:
            with suppress(RuntimeError):  # an earlier error may have made the device unusable
                torch.cuda.empty_cache()
            with self._changed:
                self._taken.value -= nbytes
                self._changed.notify_all()


def chosen(cases: list[Case], options: argparse.Namespace) -> list[Case]:
    """Return the cases to run; cases that compile a kernel come first."""
    return ordered([case for case in cases if case.dtype in options.dtype])


def work(options: argparse.Namespace, results: Path, begun: Any, memory: Memory) -> None:
    """Run cases that no other process has started, and write two lines for each.

    The first line is written before the case, and remains if the case crashes or never ends.
    """
    test = load(options.checkout)
    cases = chosen(collect(test), options)
    with results.open("w", buffering=1) as lines:
        while (case := _next(cases, begun)) is not None:
            line = {"dtype": case.dtype, "case": str(case.param), "message": _NO_END}
            with memory.take(bytes_of(case)):
                lines.write(json.dumps(line) + "\n")
                message = run(test, case)
            lines.write(json.dumps({**line, "message": message}) + "\n")
            if message and is_lost():
                return


def _next(cases: list[Case], begun: Any) -> Case | None:
    with begun.get_lock():
        number = begun.value
        begun.value += 1
    return cases[number] if number < len(cases) else None


def run_all(options: argparse.Namespace, num_cases: int) -> list[dict[str, str]]:
    """Run the chosen cases in several processes; return the last line of each started case.

    All processes end if one of them crashes or the time is over.
    """
    context = multiprocessing.get_context("spawn")
    free, _ = torch.cuda.mem_get_info()
    memory = Memory(context, free // 2)  # kernels, buffers and cached blocks need the rest
    begun = context.Value("q", 0)
    started = shown = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.jsonl") for number in range(options.workers)]
        processes = [
            context.Process(target=work, args=(options, file, begun, memory), daemon=True)
            for file in files
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            time.sleep(0.2)
            now = time.monotonic()
            if now - shown >= 10:
                shown = now
                number = min(begun.value, num_cases)
                print(f"{now - started:.0f} s: {number} of {num_cases} cases started", flush=True)
            crashed = [p.exitcode for p in processes if p.exitcode]
            if crashed or now - started > options.seconds:
                why = f"a process ended with {crashed[0]}" if crashed else "the time is over"
                print(f"stopped: {why}", flush=True)
                break
        for process in processes:
            process.kill()
            process.join()
        return [line for file in files if file.exists() for line in last_lines(file)]


def last_lines(results: Path) -> list[dict[str, str]]:
    """Return the last complete line of each case in the file of a process."""
    whole = [line for line in results.read_text().splitlines() if line.endswith("}")]
    lines = [json.loads(line) for line in whole]
    return list({(line["dtype"], line["case"]): line for line in lines}.values())


def counts_of(cases: list[Case], ended: list[dict[str, str]]) -> dict[str, dict[str, int]]:
    """Return, for each dtype, the numbers of collected, passed, failed and not run cases."""
    collected = Counter(case.dtype for case in cases)
    passed = Counter(line["dtype"] for line in ended if not line["message"])
    failed = Counter(line["dtype"] for line in ended if line["message"])
    return {
        dtype: {
            "collected": collected[dtype],
            "passed": passed[dtype],
            "failed": failed[dtype],
            "not run": collected[dtype] - passed[dtype] - failed[dtype],
        }
        for dtype in DTYPES
    }


def show(counts: dict[str, dict[str, int]], ended: list[dict[str, str]]) -> bool:
    """Print counts and the first failures; return whether all cases of both dtypes passed."""
    for dtype, count in counts.items():
        print(f"{dtype}: " + ", ".join(f"{number} {word}" for word, number in count.items()))
    failures = [line for line in ended if line["message"]]
    for line in failures[:_SHOWN]:
        print(f"\n{line['dtype']} {line['case']}\n{line['message']}")
    if len(failures) > _SHOWN:
        print(f"\nand {len(failures) - _SHOWN} more failures")
    return all(count["passed"] == count["collected"] > 0 for count in counts.values())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m ci.flashmla",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("checkout", type=Path, metavar="PATH", help="a checkout of FlashMLA")
    made.add_argument(
        "--dtype", action="append", choices=DTYPES, help="run only this dtype (exit status 1)"
    )
    made.add_argument(
        "--workers", type=_positive, default=WORKERS, help=f"processes (default: {WORKERS})"
    )
    made.add_argument(
        "--seconds", type=_positive, default=1800, help="the time limit (default: 1800)"
    )
    made.add_argument("--report", type=Path, help="write counts, failures and versions as JSON")
    made.add_argument("--commit", help="FlashMLA's commit, if PATH is a copy without its history")
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: an integer >= 1")
    return int(text)


def main(arguments: list[str]) -> int:
    """Run the cases; return the exit status of the module's description."""
    asked = parser()
    options = asked.parse_args(arguments)
    options.dtype = options.dtype or list(DTYPES)
    options.checkout = options.checkout.resolve()
    if not (options.checkout / TEST).is_file():
        allowed = "a checkout of https://github.com/deepseek-ai/FlashMLA"
        asked.error(f"PATH: got {options.checkout}, which has no {TEST}; allowed: {allowed}")
    report = options.report
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        asked.error(f"--report: got {report}; allowed: a file in a folder that exists")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("SKIPPED: FlashMLA's dense decode test needs a Hopper GPU, but torch finds none")
        return CANNOT_RUN_HERE
    started = time.monotonic()
    try:
        cases = collect(load(options.checkout))
    except (AttributeError, ImportError, TypeError) as error:  # the test of another commit differs
        allowed = "a complete checkout of FlashMLA at commit 9241ae3"
        asked.error(f"PATH: got {options.checkout}, whose {TEST}: {error}; allowed: {allowed}")
    ended = run_all(options, len(chosen(cases, options)))
    seconds = round(time.monotonic() - started)
    counts = counts_of(cases, ended)
    versions = device_record() | {
        "flashmla": options.commit or commit_of_checkout(options.checkout / TEST)
    }
    all_passed = show(counts, ended)
    print(f"{seconds} s, " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    if report is not None:
        failures = [line for line in ended if line["message"]]
        document = {**versions, "seconds": seconds, "counts": counts, "failures": failures}
        report.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if all_passed else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for each of the processes
    sys.exit(main(sys.argv[1:]))
