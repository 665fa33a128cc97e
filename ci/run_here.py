"""Run the suite, or the optimized package's tests, in this interpreter: no install, no network.

For machines that already have torch, Triton, NumPy, ml_dtypes and pytest:

    python ci/run_here.py --report conformance/reports/h200.json
    python ci/run_here.py --tests          # the optimized package's own tests first
    python ci/run_here.py --gpu-tests      # its tests that need a GPU, and nothing else

Arguments it does not know go to ``python -m paged_mla_conformance``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "reference", "optimized", "conformance")


def main() -> int:
    """Return 0 when everything asked for passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="paged_mla_optimized.backend:create")
    parser.add_argument("--tests", action="store_true", help="run optimized/tests first")
    parser.add_argument("--gpu-tests", action="store_true", help="run optimized/tests_gpu only")
    options, rest = parser.parse_known_args()
    paths = [str(ROOT / package / "src") for package in PACKAGES]
    paths += filter(None, [os.environ.get("PYTHONPATH")])  # what the caller adds stays
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    suite = ["-m", "paged_mla_conformance", "--backend", options.backend, *rest]
    commands = [suite]
    if options.gpu_tests:
        alone = ["-p", "no:benchmark"]  # a plugin that warns beside xdist, and warnings are errors
        commands = [["-m", "pytest", *alone, str(ROOT / "optimized" / "tests_gpu"), *rest]]
    elif options.tests:
        commands.insert(0, ["-m", "pytest", "--quiet", str(ROOT / "optimized" / "tests")])
    codes = [
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False)
        for command in commands
    ]
    return max(done.returncode for done in codes)


if __name__ == "__main__":
    sys.exit(main())
