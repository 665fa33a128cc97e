r"""Test every public call with legal and illegal contents of tensors and arguments.

    python optimized/tests_misuse --seconds 120
    python optimized/tests_misuse --device cpu --only step,drafts --seed 7

Without a GPU, and with ``--device cpu``, kernels run in Triton's interpreter, where every address
is checked against the tensors of its launch. On a GPU, under a tool that checks accesses:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 MISUSE_MARGIN=0 \
        compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 86 \
        python optimized/tests_misuse --seconds 600 --least 0

Errors of the CUDA API are not reported there, because NCCL looks up kernels that its library may
lack.

A failing draw is printed as a Python expression; ``--ask`` takes this text and repeats the draw.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("shared", "reference", "optimized", "conformance/adapters")


def main() -> int:
    """Return 0 if no draw failed and every cell was drawn often enough."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first draws")
    parser.add_argument("--only", metavar="NAMES", help="names of subjects, for example step,layer")
    parser.add_argument(
        "--least",
        type=int,
        default=0,
        metavar="N",
        help="fewest draws of each cell; fewer are an error",
    )
    parser.add_argument("--ask", metavar="DRAW", help="check only this draw")
    options = parser.parse_args()
    if options.device == "cpu" or (options.device == "auto" and not torch.cuda.is_available()):
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    elif options.device == "cuda":
        os.environ.pop("TRITON_INTERPRET", None)
    folders = (f"{name}/src" for name in SOURCES)
    sys.path[:0] = [str(HERE), *(str(HERE.parents[1] / folder) for folder in folders)]
    from search import Search  # noqa: PLC0415 - Triton reads the environment
    from subjects import SUBJECTS, ask  # noqa: PLC0415 - as above

    if options.ask:
        ask(options.ask)
        print("passed")
        return 0
    names = options.only.split(",") if options.only else [*SUBJECTS]
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"--only: got {', '.join(unknown)}; allowed: {', '.join(SUBJECTS)}")
    started = time.monotonic()
    search = Search(started + options.seconds)
    search.run([SUBJECTS[name] for name in names], options.seed)
    rare = []
    for name, cells in search.cells.items():
        print(f"\n{name}, draws\n{cells}")
        rare += [(name, *cell) for cell in cells.rare(options.least)]
    for failure in search.failures.values():
        print(f"\n{failure.subject}, {failure.count} draws: {failure.message}\n  {failure.draw!r}")
    print(f"\n{search.draws} draws, {len(search.failures)} failures, "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip
    if rare:
        print(f"{len(rare)} cells were drawn fewer than {options.least} times: {rare[:8]}")
    return 1 if search.failures or rare else 0


if __name__ == "__main__":
    sys.exit(main())
