"""Compiles every kernel variant for an architecture with no GPU, and holds it against its limits.

``python -m paged_mla_optimized.tools.aot --arch sm90 [--json PATH]`` prints registers, stack
(spills) and shared memory of each, and exits 1 if one fails, needs more shared memory than there
is, which the compiler itself does not look at, or is compiled in a way that ``sass.py`` looks for.
``--against PATH`` names the variants whose instructions are not those of a table that ``--json``
wrote: what was measured of the others holds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from paged_mla_optimized.planning.families import SHARED_MEMORY
from paged_mla_optimized.runtime.device import is_interpreting
from paged_mla_optimized.tools.aot_jobs import Job, jobs_of_arch
from paged_mla_optimized.tools.sass import lost_signs, overwritten_operands, serialized_products

_OF_SOURCE = re.compile(r"$|\.loc\b|\.file\b|\$L__tmp\d+:$")
"""A line of PTX without an instruction."""


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
    ptx : str
        Hash of its instructions, whatever source lines they come from.
    error : str or None
        Why it did not compile, what it exceeds, or what ptxas made of it.
    """

    name: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    ptx: str = ""
    error: str | None = None


def compile_job(job: Job, arch: str) -> Usage:
    """Compile one kernel variant for `arch`, a key of ``SHARED_MEMORY``."""
    try:
        compiled = compiled_kernel(job, arch)
    except (triton.TritonError, RuntimeError) as error:
        return Usage(job.name, error=str(error).strip())
    dump = _dump(compiled.asm["cubin"])
    registers, stack_bytes = _resources(dump)
    shared_bytes = compiled.metadata.shared
    fault = None
    if shared_bytes > SHARED_MEMORY[arch]:
        fault = f"more than {SHARED_MEMORY[arch]} bytes of shared memory"
    elif lost := lost_signs(dump):
        fault = f"ptxas may have lost a sign: {lost[0]}"
    elif overwritten := overwritten_operands(dump):
        fault = f"an operand of a product is overwritten: {overwritten[0]}"
    # In portable kernels it is Triton, not ptxas, that decides what waits for a product.
    elif job.name.startswith("hopper") and (serialized := serialized_products(dump)):
        fault = f"each of {len(serialized)} products waits for the one before: {serialized[0]}"
    ptx = hash_of_instructions(compiled.asm["ptx"])
    return Usage(job.name, registers, stack_bytes, shared_bytes, ptx, fault)


def compiled_kernel(job: Job, arch: str) -> Any:
    """Return Triton's kernel, whose ``asm["cubin"]`` is the binary."""
    target = GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    return triton.compile(job.source, target=target, options=job.options)


def hash_of_instructions(ptx: str) -> str:
    """Return a hash of PTX without comments, and without what tells of source lines."""
    code = re.sub(r"//.*", "", ptx.split(".section", maxsplit=1)[0])
    lines = (line.strip() for line in code.splitlines())
    told = "\n".join(line for line in lines if not _OF_SOURCE.match(line))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def changes(before: list[dict[str, Any]], now: list[Usage]) -> list[str]:
    """Return what became of variants since a table that ``--json`` wrote, a line of each."""
    old = {one["name"]: one["ptx"] for one in before}
    new = {usage.name: usage.ptx for usage in now}
    told = [f"gone: {name}" for name in old if name not in new]
    told += [f"new: {name}" for name in new if name not in old]
    told += [f"changed: {name}" for name in new if old.get(name, new[name]) != new[name]]
    return told


def _dump(cubin: bytes) -> str:
    """Return what cuobjdump says of a binary: resources, and instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(dump: str) -> tuple[int, int]:
    """Return registers and stack bytes of a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", dump)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resources: {dump}")
    return int(found[1]), int(found[2])


def main(arguments: list[str] | None = None) -> int:
    """Compile everything for one architecture; return the exit status."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.aot", description=__doc__)
    parser.add_argument("--arch", required=True, choices=SHARED_MEMORY)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the table there")
    parser.add_argument("--against", type=Path, metavar="PATH", help="table of an earlier --json")
    options = parser.parse_args(arguments)
    if is_interpreting():
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: got {options.json}; allowed: a file in a folder that is there")
    before = _load(parser, options.against, options.arch) if options.against else None
    jobs = jobs_of_arch(options.arch)
    width = max(len(job.name) for job in jobs)
    print(f"{'variant':{width}}  regs  stack  shared")
    usages: list[Usage] = []
    for job in jobs:
        usage = compile_job(job, options.arch)
        usages.append(usage)
        numbers = f"{usage.registers:4}  {usage.stack_bytes:5}  {usage.shared_bytes:6}"
        print(f"{usage.name:{width}}  {numbers}  {usage.error or ''}".rstrip(), flush=True)
    if options.json:
        table: dict[str, Any] = {"arch": options.arch, "variants": [asdict(u) for u in usages]}
        options.json.write_text(json.dumps(table, indent=2) + "\n")
    if before is not None:
        told = changes(before, usages)
        print("\n".join(told or [f"every variant has the instructions of {options.against}"]))
    failed = sum(usage.error is not None for usage in usages)
    print(f"{len(usages)} variants for {options.arch}, {failed} failed")
    return 1 if failed else 0


def _load(parser: argparse.ArgumentParser, path: Path, arch: str) -> list[dict[str, Any]]:
    """Return the variants of a table, or end with what is wrong with it."""
    if not path.is_file():
        parser.error(f"--against: got {path}; allowed: a file that --json wrote")
    try:
        read: Any = json.loads(path.read_text())
    except ValueError:
        read = None
    table: dict[str, Any] = read if isinstance(read, dict) else {}  # refused below
    variants: list[dict[str, Any]] = table.get("variants", [])
    if table.get("arch") != arch or not all({"name", "ptx"} <= one.keys() for one in variants):
        parser.error(f"--against: got {path}; allowed: a table of {arch} with hashes of PTX")
    return variants


if __name__ == "__main__":
    sys.exit(main())
