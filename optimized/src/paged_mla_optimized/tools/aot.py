"""Compiles every kernel variant for an architecture with no GPU, and holds it against its limits.

``python -m paged_mla_optimized.tools.aot --arch sm90`` prints registers, stack (spills) and shared
memory of each variant as soon as those before it are printed, and at the end which failed. It exits
1 if one fails: it does not compile, needs more shared memory than there is, which the compiler
itself does not look at, rounds by an instruction that ``arithmetic.py`` does not list, or is
compiled in a way that ``sass.py`` looks for.

``--sample`` takes a few variants of each kernel, the same in every run. ``--shard 2/8`` takes the
second of eight equal parts of all variants, for several machines. Whether a change of the sources
has left instructions alone is a question for ``fingerprints.py``, which compiles little.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from paged_mla_optimized.config.architectures import SHARED_MEMORY
from paged_mla_optimized.tools.aot_job import Job
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch, sample_of
from paged_mla_optimized.tools.arithmetic import unlisted
from paged_mla_optimized.tools.sass import lost_signs, overwritten_operands, serialized_products
from paged_mla_optimized.triton_compat.cache_keys import settle_key
from paged_mla_optimized.triton_compat.compilation import CompilationError, compiled
from paged_mla_optimized.triton_compat.interpreter import is_interpreting
from paged_mla_optimized.triton_compat.settings import cuobjdump

T = TypeVar("T")
_OF_INTEREST = re.compile(r"\b(?:wgmma|(?:min|max)\.[su])")
"""The instructions of PTX of which ptxas makes those that ``sass.py`` looks for."""
_BEFORE_HOPPER = {"sm80", "sm86", "sm89"}
"""Architectures that have none of the instructions that ``sass.py`` looks for: nvdisasm 12.8 does
not know VIADDMNMX there, and products of a warpgroup came with sm_90."""


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel needs.

    Parameters
    ----------
    name : str
    registers : int
        Of one thread.
    stack_bytes : int
        Of one thread; spilled registers live there.
    shared_bytes : int
        Of one program.
    error : str or None
        Why it did not compile, what it exceeds, or what ptxas made of it.
    """

    name: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    error: str | None = None


def compile_job(job: Job, arch: str) -> Usage:
    """Compile one kernel variant for `arch`, a key of ``SHARED_MEMORY``."""
    try:
        compiled = compiled_kernel(job, arch)
    except (CompilationError, RuntimeError) as error:
        return Usage(job.name, error=str(error).strip())
    registers, stack_bytes = _resources(_dump(compiled, "-res-usage"))
    sass = disassembled(compiled) if _may_be_wrong(compiled.asm["ptx"], arch) else ""
    shared_bytes = compiled.metadata.shared
    fault = None
    if strangers := unlisted(compiled.asm["ptx"], job, arch):
        fault = f"no such arithmetic is listed in tools/arithmetic.py: {' '.join(strangers)}"
    elif shared_bytes > SHARED_MEMORY[arch]:
        fault = f"more than {SHARED_MEMORY[arch]} bytes of shared memory"
    elif lost := lost_signs(sass):
        fault = f"ptxas may have lost a sign: {lost[0]}"
    elif overwritten := overwritten_operands(sass):
        fault = f"an operand of a product is overwritten: {overwritten[0]}"
    # In portable kernels it is Triton, not ptxas, that decides what waits for a product.
    elif job.name.startswith("hopper") and (serialized := serialized_products(sass)):
        fault = f"each of {len(serialized)} products waits for the one before: {serialized[0]}"
    return Usage(job.name, registers, stack_bytes, shared_bytes, fault)


def _may_be_wrong(ptx: str, arch: str) -> bool:
    """Return whether ptxas can have left what ``sass.py`` looks for.

    That is made of products of a warpgroup, and of minima and maxima of integers. Disassembling
    takes seconds, however small the binary is.
    """
    return arch not in _BEFORE_HOPPER and _OF_INTEREST.search(ptx) is not None


def compiled_kernel(job: Job, arch: str) -> Any:
    """Return Triton's kernel, whose ``asm["cubin"]`` is the binary; on disk it is found again."""
    settle_key(job.kernel)
    return compiled(job.source, arch, job.options)


def shard_of(chosen: list[T], index: int, shards: int) -> list[T]:
    """Return the `index`-th of `shards` equal parts, counted from 1."""
    return chosen[index - 1 :: shards]


def disassembled(compiled: Any) -> str:
    """Return the machine code of Triton's kernel as text."""
    return _dump(compiled, "-sass")


def _dump(compiled: Any, what: str) -> str:
    """Return what cuobjdump prints of the binary of Triton's kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [cuobjdump(), what, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(dump: str) -> tuple[int, int]:
    """Return registers and stack bytes of a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resources: {dump}")
    return int(found[1]), int(found[2])


def main(arguments: list[str] | None = None) -> int:
    """Compile everything for some architectures; return the exit status."""
    options = _options(arguments)
    began = time.monotonic()
    chosen: list[tuple[str, Job]] = []
    for arch in options.arch:
        jobs = jobs_of_arch(arch)
        chosen += ((arch, job) for job in (sample_of(jobs) if options.sample else jobs))
    chosen = shard_of(chosen, *options.shard)
    usages: list[Usage] = []
    failed: list[str] = []
    width = max((len(job.name) for _, job in chosen), default=0)
    print(f"arch   {'variant':{width}}  regs  stack  shared  seconds")
    for (arch, _), (usage, seconds) in zip(chosen, _compiled(chosen, options.workers), strict=True):
        usages.append(usage)
        numbers = f"{usage.registers:4}  {usage.stack_bytes:5}  {usage.shared_bytes:6}"
        told = f"{arch:5}  {usage.name:{width}}  {numbers}  {seconds:7.1f}  {usage.error or ''}"
        print(told.rstrip(), flush=True)
        if usage.error is not None:
            failed.append(f"failed for {arch}: {usage.name}")
    took = time.monotonic() - began
    print("\n".join(failed), end="\n" if failed else "")
    print(
        f"{len(usages)} variants for {' '.join(options.arch)}, {len(failed)} failed, {took:.0f} s"
    )
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options, or end with an error."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.aot", description=__doc__)
    parser.add_argument("--arch", required=True, nargs="+", choices=SHARED_MEMORY)
    parser.add_argument("--sample", action="store_true", help="a few variants of each kernel alone")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=int, default=cores, metavar="N", help="processes; default: one a core"
    )
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers: got {options.workers}; allowed: 1 or more")
    if is_interpreting():
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    return options


def _shard(text: str) -> tuple[int, int]:
    """Return which part of how many."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, shards = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= shards:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: I/N, with I from 1 to N")
    return index, shards


def _compiled(chosen: list[tuple[str, Job]], workers: int) -> Iterator[tuple[Usage, float]]:
    """Yield what each kernel needs, in order, and the seconds that it took.

    No process compiles for two architectures: in Triton 3.6.0 the first one that a process compiles
    an FP8 conversion for chooses its instructions for all later ones
    (``getConversionFunc`` in ``TritonNVIDIAGPUToLLVM/ElementwiseOpToLLVM.cpp``).
    """
    context = multiprocessing.get_context("spawn")  # Triton's compiler has threads of its own
    for arch, group in groupby(chosen, key=itemgetter(0)):
        jobs = [job for _, job in group]
        with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
            yield from pool.map(_compile_timed, jobs, repeat(arch))


def _compile_timed(job: Job, arch: str) -> tuple[Usage, float]:
    began = time.monotonic()
    usage = compile_job(job, arch)
    return usage, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
