"""Compile every kernel variant for an architecture without a GPU, and check its limits.

``python -m paged_mla_optimized.tools.aot --arch sm90`` prints the registers, the stack (spills) and
the shared memory of each variant, in order, and at the end the variants that failed. It exits with
1 if a variant failed. A variant fails if it does not compile, if it needs more shared memory than
the architecture has (the compiler does not check this), if it uses an instruction that
``arithmetic.py`` does not list, or if ``sass.py`` finds a known fault of the compiler in it.

``--sample`` compiles a few variants of each kernel, the same in every run. ``--shard 2/8`` compiles
the second of eight equal parts of all variants, for several machines. Use ``fingerprints.py`` to
check whether a change of the sources changes any instructions; it compiles less.
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
"""The PTX instructions that ptxas translates to the instructions that ``sass.py`` checks."""
_BEFORE_HOPPER = {"sm80", "sm86", "sm89"}
"""Architectures without the instructions that ``sass.py`` checks: nvdisasm 12.8 does not support
VIADDMNMX there, and products of a warp group exist since sm_90."""


@dataclass(frozen=True)
class Usage:
    """The resources that one compiled kernel needs.

    Parameters
    ----------
    name : str
        The name of the variant.
    registers : int
        The registers of one thread.
    stack_bytes : int
        The stack of one thread, which contains spilled registers.
    shared_bytes : int
        The shared memory of one program.
    error : str or None
        The reason of a failure: a compiler error, an unlisted instruction, an exceeded limit, or a
        fault of ptxas.
    """

    name: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    error: str | None = None


def compile_job(job: Job, arch: str) -> Usage:
    """Compile one kernel variant for `arch`, a key of ``SHARED_MEMORY``, and check it."""
    try:
        compiled = compiled_kernel(job, arch)
    except (CompilationError, RuntimeError) as error:
        return Usage(job.name, error=str(error).strip())
    registers, stack_bytes = _resources(_dump(compiled, "-res-usage"))
    sass = disassembled(compiled) if _may_be_wrong(compiled.asm["ptx"], arch) else ""
    shared_bytes = compiled.metadata.shared
    fault = None
    if strangers := unlisted(compiled.asm["ptx"], job, arch):
        fault = f"tools/arithmetic.py does not list these instructions: {' '.join(strangers)}"
    elif shared_bytes > SHARED_MEMORY[arch]:
        fault = f"the kernel needs more than {SHARED_MEMORY[arch]} bytes of shared memory"
    elif lost := lost_signs(sass):
        fault = f"ptxas may have lost a sign: {lost[0]}"
    elif overwritten := overwritten_operands(sass):
        fault = f"an operand of a product is overwritten: {overwritten[0]}"
    # In portable kernels Triton, not ptxas, places the waits for products.
    elif job.name.startswith("hopper") and (serialized := serialized_products(sass)):
        fault = f"each of {len(serialized)} products waits for the previous one: {serialized[0]}"
    return Usage(job.name, registers, stack_bytes, shared_bytes, fault)


def _may_be_wrong(ptx: str, arch: str) -> bool:
    """Return whether the binary may contain a fault that ``sass.py`` checks.

    These faults come from products of a warp group and from minima and maxima of integers. The
    disassembly of other binaries is skipped, because it takes seconds even for a small binary.
    """
    return arch not in _BEFORE_HOPPER and _OF_INTEREST.search(ptx) is not None


def compiled_kernel(job: Job, arch: str) -> Any:
    """Return Triton's compiled kernel, whose ``asm["cubin"]`` is the binary; Triton caches it."""
    settle_key(job.kernel)
    return compiled(job.source, arch, job.options)


def shard_of(chosen: list[T], index: int, shards: int) -> list[T]:
    """Return every `shards`-th element of a list, starting with the `index`-th, from 1."""
    return chosen[index - 1 :: shards]


def disassembled(compiled: Any) -> str:
    """Return the machine code of a compiled kernel as text."""
    return _dump(compiled, "-sass")


def _dump(compiled: Any, what: str) -> str:
    """Return the output of cuobjdump with the option `what` for the binary of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        command = [cuobjdump(), what, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(dump: str) -> tuple[int, int]:
    """Return the registers and the stack bytes of a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no registers and stack: {dump}")
    return int(found[1]), int(found[2])


def main(arguments: list[str] | None = None) -> int:
    """Compile the variants for the chosen architectures; return the exit status."""
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
    """Return the options of the command line; end the process if they are invalid."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.aot", description=__doc__)
    parser.add_argument("--arch", required=True, nargs="+", choices=SHARED_MEMORY)
    parser.add_argument("--sample", action="store_true", help="only a few variants of each kernel")
    parser.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="only the I-th of N parts"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers", type=int, default=cores, metavar="N", help="processes; default: one per core"
    )
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers: got {options.workers}; allowed: 1 or more")
    if is_interpreting():
        parser.error("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    return options


def _shard(text: str) -> tuple[int, int]:
    """Return the number of the part and the number of parts."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, shards = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= shards:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: I/N, with I from 1 to N")
    return index, shards


def _compiled(chosen: list[tuple[str, Job]], workers: int) -> Iterator[tuple[Usage, float]]:
    """Yield the resources of each kernel, in order, and the seconds that its compilation took.

    No process compiles for two architectures. In Triton 3.6.0 the first FP8 conversion that a
    process compiles selects the instructions for all later architectures
    (``getConversionFunc`` in ``TritonNVIDIAGPUToLLVM/ElementwiseOpToLLVM.cpp``).
    """
    context = multiprocessing.get_context("spawn")  # Triton's compiler starts threads
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
