"""Random steps on every kernel family, in every cache format and mode, against the reference.

    python optimized/tests_gpu/fuzz --seconds 500 --workers 16

A draw is one step: load the cache, plan, append, attend; the conformance suite judges each. All
steps of one configuration run on one runner, so that graphed steps are captured once and replayed.
Needs a GPU, torch, Triton, NumPy, ml_dtypes and pytest, and no install. Exits 1 if an output was
wrong, and 3 where some combination got fewer than --least draws.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    """Run the search until the time is over; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="optimized/tests_gpu/fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=500.0, help="(default: 500)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes; 0: this one alone"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument(
        "--least", type=int, default=200, help="draws of each combination (default: 200)"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of each configuration (default: 40)"
    )
    parser.add_argument(
        "--device", choices=("gpu", "cpu"), default="gpu", help="cpu: Triton's interpreter"
    )
    parser.add_argument(
        "--fewer-keys",
        action="store_true",
        help="draw rows without a causal mask that have fewer keys than queries",
    )
    parser.add_argument(
        "--only", metavar="WORD", default="", help="combinations whose name has this in it"
    )
    parser.add_argument(
        "--replay", metavar="FAMILY/FORMAT/MODE/NUMBER", help="run one configuration again"
    )
    options = parser.parse_args()
    for name, least in (("workers", 0), ("least", 0), ("steps", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}; allowed: >= {least}")
    sys.path.insert(0, str(ROOT))
    from ci.packages import PACKAGES  # noqa: PLC0415 - behind its path

    sys.path[1:1] = [str(ROOT / package.source) for package in PACKAGES.values()]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process for each core already
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from search import run  # noqa: PLC0415 - behind the paths of the packages

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the table is told
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
