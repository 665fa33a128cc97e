"""Run the suite, or the tests that need a GPU, without installing packages.

The machine needs torch, Triton, NumPy, ml_dtypes and pytest:

    python -m ci.run_here --report conformance/reports/h200.json
    python -m ci.run_here --gpu-tests         # only tests that need a GPU
    python -m ci.run_here --modes out/h200    # writes out/h200-graphed.json and so on

Other options are passed to ``paged-mla conformance``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from ci.packages import PACKAGES, ROOT

BACKEND = "paged_mla_optimized.backend:create"
MODES = {
    "batch_invariant": "strict",
    "portable": "strict",
    "graphed": "strict",
    "compiled": "strict",
    "request_map": "strict",
    "reserved_slot": "sglang",
    "base_2": "kernel,base-2",
    "fast": "strict",
    "unchecked": "kernel",
}
"""Factories of ``paged_mla_optimized.backend.modes``, and the suite's profile for each."""
CANNOT_RUN_HERE = 5
"""The exit status of the suite for a backend that cannot run on this machine."""


def main() -> int:
    """Run the suite or the tests; return 0 if they passed, otherwise the largest exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", metavar="MODULE:FACTORY", help=f"(default: {BACKEND})")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--gpu-tests", action="store_true", help="run optimized/tests_gpu only")
    others.add_argument(
        "--modes",
        metavar="PREFIX",
        help="test every mode of the Triton backend, with reports in PREFIX-<mode>.json",
    )
    options, rest = parser.parse_known_args()
    if options.backend and (options.gpu_tests or options.modes):
        parser.error(
            f"--backend: got {options.backend}; allowed: only without --gpu-tests and --modes"
        )
    for option in ("--report", "--profile"):
        if options.modes and any(argument.split("=")[0] == option for argument in rest):
            parser.error(f"{option} is not allowed with --modes, which sets it for each mode")
    paths = [str(ROOT / package.source) for package in PACKAGES.values()]
    paths += filter(None, [os.environ.get("PYTHONPATH")])  # keeps the caller's own paths
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    suite = ["-m", "paged_mla", "conformance", "--backend", options.backend or BACKEND, *rest]
    commands = [suite]
    if options.gpu_tests:
        alone = ["-p", "no:benchmark"]  # this plugin warns with xdist, and warnings are errors
        commands = [["-m", "pytest", *alone, str(ROOT / "optimized" / "tests_gpu"), *rest]]
    elif options.modes:
        commands = [suite_of(mode, options.modes, rest) for mode in MODES]
    codes = [
        subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, check=False
        ).returncode
        for command in commands
    ]
    if options.modes and set(codes) != {CANNOT_RUN_HERE}:  # enough that one mode can run
        codes = [0 if code == CANNOT_RUN_HERE else code for code in codes]
    return max(map(abs, codes))  # the status is negative if a signal killed the process


def suite_of(mode: str, prefix: str, rest: list[str]) -> list[str]:
    """Return the arguments of Python that test one mode and write its report."""
    backend = ("--backend", f"paged_mla_optimized.backend.modes:{mode}", "--profile", MODES[mode])
    return ["-m", "paged_mla", "conformance", *backend, "--report", f"{prefix}-{mode}.json", *rest]


if __name__ == "__main__":
    sys.exit(main())
