"""Shows that a change of the sources leaves the instructions of kernels alone.

``python -m paged_mla_optimized.tools.fingerprints`` compares every kernel variant of every
architecture with the fingerprints in ``optimized/fingerprints``. It names those that differ and
exits 1 if there are any. ``--renew`` writes the fingerprints of today instead. It needs no GPU.

A fingerprint is a hash of what the first stage of Triton's compiler makes of a kernel: its
intermediate representation, in which all functions are inlined, without names and source lines.
The hash covers the options of the compiler too. The later stages see nothing else, so variants with
equal fingerprints have equal PTX, but for the order of a kernel's parameters: a fingerprint numbers
arguments by their first use. Moving code between functions, renaming, and another order of
parameters, in records or not, change no fingerprint. Nor does the order in which constants are
first named, of which no instructions are made.
A variant whose fingerprint differs may have the same machine code all the same: ``--tree FOLDER``
compiles it from these sources and from another checkout of this repository, and compares that.

Source lines are left out because ptxas 12.8.93 reads them: with other line numbers it can name
registers otherwise and move single instructions, even for a comment that is added above a kernel.

The first stage takes up to a second for each of some 16 thousand variants. Each line of a file
therefore has a second hash, of a variant's sources, constants and options. Where that is known, the
tool does not run the stage.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import triton

from paged_mla_optimized.config.architectures import SHARED_MEMORY
from paged_mla_optimized.tools.aot import compiled_kernel, disassembled
from paged_mla_optimized.tools.aot_job import Job
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch
from paged_mla_optimized.triton_compat.cache_keys import settle_key
from paged_mla_optimized.triton_compat.compilation import first_stage
from paged_mla_optimized.triton_compat.interpreter import is_interpreting
from paged_mla_optimized.triton_compat.settings import leave_out_source_lines

FOLDER = Path(__file__).parents[3] / "fingerprints"
_DIGITS = 12


@dataclass(frozen=True)
class Fingerprint:
    """What one variant is compiled from.

    Parameters
    ----------
    name : str
        Of the variant, for people; it takes no part in comparisons.
    source : str
        Hash of the sources of a kernel and of what it calls, its constants and options.
    meaning : str
        Hash of the first stage's result.
    """

    name: str
    source: str
    meaning: str


def source_of(job: Job) -> str:
    """Return the hash of a variant's sources, constants, types of arguments and options."""
    settle_key(job.kernel)
    return _hash(job.source.hash(), repr(sorted(job.options.items())))


def meaning_of(job: Job, arch: str) -> str:
    """Return the hash of what the first stage of the compiler makes of a variant."""
    settle_key(job.kernel)
    text = without_order(without_names(first_stage(job.source, arch, job.options)))
    return _hash(text, repr(sorted(job.options.items())))


def without_names(text: str) -> str:
    """Return the text of a module whose functions have numbers for names."""
    names = dict.fromkeys(re.findall(r"(?<=@)[\w$.]+", text))
    numbers = {name: f"f{number}" for number, name in enumerate(names)}
    return re.sub(r"(?<=@)[\w$.]+", lambda found: numbers[found[0]], text)


def without_order(text: str) -> str:
    """Return the text of a module whose order of constants and of arguments says nothing.

    Constants stand where they are used. The arguments of its one function are numbered by their
    first use; those that it does not use follow, in the order of their types. Blocks inside the
    function have arguments with further numbers, which change likewise.
    """
    text = "\n".join(_with_constants(text.splitlines()))
    found = re.search(r"tt\.func [^(]*\((%arg.*)\) attributes", text)
    if found is None:
        return text
    arguments = dict(one.split(": ", 1) for one in re.split(r", (?=%arg\d+: )", found[1]))
    body = text[found.end() :]
    used = dict.fromkeys(re.findall(r"%arg\d+", body))
    unused = sorted((name for name in arguments if name not in used), key=arguments.__getitem__)
    numbers = {name: f"%arg{number}" for number, name in enumerate((*used, *unused))}
    in_order = ", ".join(
        f"{number}: {arguments[name]}" for name, number in numbers.items() if name in arguments
    )
    body = re.sub(r"%arg\d+", lambda one: numbers[one[0]], body)
    return text[: found.start(1)] + in_order + text[found.end(1) : found.end()] + body


def _with_constants(lines: list[str]) -> Iterator[str]:
    """Yield lines in which constants stand in place of their names, which blocks may give anew."""
    values: dict[str, str] = {}
    for line in lines:
        if defined := re.fullmatch(r" *(%\w+) = (arith\.constant .*)", line):
            values[defined[1]] = f"({defined[2]})"
        else:
            yield re.sub(r"%\w+", lambda name: values.get(name[0], name[0]), line)


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_DIGITS]


def read(path: Path) -> dict[str, str]:
    """Return the meanings in a file by source, none if they are of another Triton."""
    if not path.exists():
        return {}
    version, *lines = path.read_text().splitlines()
    if version != _version():
        return {}
    return dict(line.split() for line in lines)


def write(path: Path, found: list[Fingerprint]) -> None:
    """Write the fingerprints of one architecture, in an order that names do not change."""
    lines = sorted(f"{one.source} {one.meaning}" for one in found)
    path.write_text("\n".join((_version(), *lines)) + "\n")


def _version() -> str:
    return f"triton {triton.__version__}"


def fingerprints(arch: str, known: dict[str, str], workers: int) -> Iterator[Fingerprint]:
    """Yield the fingerprint of each variant, at once for those whose sources are `known`."""
    jobs = jobs_of_arch(arch)
    context = multiprocessing.get_context("spawn")  # Triton's compiler has threads of its own
    made = partial(fingerprint_of, arch=arch, known=known)
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=context) as pool:
        yield from pool.map(made, jobs, chunksize=8)


def fingerprint_of(job: Job, arch: str, known: dict[str, str]) -> Fingerprint:
    """Return the fingerprint of one variant."""
    source = source_of(job)
    return Fingerprint(job.name, source, known.get(source) or meaning_of(job, arch))


def code_of(job: Job, arch: str) -> str:
    """Return the hash of a variant's machine code, compiled without source lines."""
    leave_out_source_lines()
    instructions = re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+(.*?);", disassembled(compiled_kernel(job, arch))
    )
    return _hash(*instructions)


def codes(arch: str, names: list[str]) -> list[str]:
    """Return the hashes of the machine code of variants; "none" for a name without one."""
    jobs = {job.name: job for job in jobs_of_arch(arch)}
    return [code_of(jobs[name], arch) if name in jobs else "none" for name in names]


def codes_of_tree(tree: Path, arch: str, names: list[str]) -> list[str]:
    """Return :func:`codes` of another checkout, in a process that imports that."""
    paths = [str(tree / package / "src") for package in ("optimized", "shared")]
    command = [sys.executable, __file__, "--arch", arch, "--code", *names]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def main(arguments: list[str] | None = None) -> int:
    """Compare or renew; return the exit status."""
    options = _options(arguments)
    if options.code:
        print(*codes(options.arch[0], options.code), sep="\n")
        return 0
    differing = 0
    for arch in options.arch:
        path = FOLDER / f"{arch}.txt"
        known = read(path)
        found = list(fingerprints(arch, known, options.workers))
        print(f"{arch}: {len(found)} variants, {len(known)} before", flush=True)
        if options.renew:
            write(path, found)
            continue
        meanings = set(known.values())
        names = [one.name for one in found if one.meaning not in meanings]
        names = _with_other_code(names, arch, options.tree)
        print("\n".join(f"{arch}: {name} differs" for name in names), end="\n" if names else "")
        differing += len(names)
    if options.renew:
        return 0
    print(f"{differing} variants differ")
    return 1 if differing else 0


def _with_other_code(names: list[str], arch: str, tree: Path | None) -> list[str]:
    """Return the variants whose machine code is not that of `tree`; without a tree, all."""
    if tree is None or not names:
        return names
    both = zip(names, codes(arch, names), codes_of_tree(tree, arch, names), strict=True)
    return [name for name, now, before in both if now != before]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="paged_mla_optimized.tools.fingerprints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", nargs="+", choices=SHARED_MEMORY, default=list(SHARED_MEMORY))
    parser.add_argument("--renew", action="store_true", help="write the fingerprints of today")
    parser.add_argument("--tree", type=Path, metavar="FOLDER", help="compile what differs in both")
    parser.add_argument("--code", nargs="+", metavar="VARIANT", help="print hashes of machine code")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes; default: the cores")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers: got {options.workers}; allowed: 1 or more")
    if options.tree is not None and not (options.tree / "optimized" / "src").is_dir():
        parser.error(f"--tree: got {options.tree}; allowed: a checkout of this repository")
    if not FOLDER.is_dir():
        parser.error(f"{FOLDER} is not there: this command runs from a clone of the repository")
    if is_interpreting():
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    return options


if __name__ == "__main__":
    sys.exit(main())
