"""Check that a change of the sources does not change the instructions of kernels.

``python -m paged_mla_optimized.tools.fingerprints`` compares every kernel variant of every
architecture with the fingerprints in ``optimized/fingerprints``. It prints the variants that differ
and exits with 1 if there are any. With ``--renew`` it writes the current fingerprints instead. It
needs no GPU.

A fingerprint is a hash of the result of the first stage of Triton's compiler: the intermediate
representation of a kernel, in which all functions are inlined, without names and source lines. The
hash also covers the options of the compiler. The later stages have no other input, so variants with
equal fingerprints have equal PTX, except for the order of the kernel's parameters, because a
fingerprint numbers arguments by their first use. Moving code between functions, renaming, and
another order of parameters, in records or not, change no fingerprint. The order of the first uses
of constants changes no fingerprint either; constants become no instructions.

A variant with another fingerprint may still have the same machine code. ``--tree FOLDER`` compiles
the variant from these sources and from another checkout of this repository and compares the machine
code.

The machine code is compiled without source lines, because ptxas 12.8.93 reads them: with other line
numbers it can choose other registers and move single instructions, even if only a comment is added
above a kernel.

The first stage takes up to a second for each of about 16 thousand variants. Each line of a file
therefore has a second hash, of a variant's sources, constants and options. If this hash is known,
the tool does not run the stage.
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
    """The hashes of one variant.

    Parameters
    ----------
    name : str
        The name of the variant, for messages; comparisons do not use it.
    source : str
        The hash of the sources of a kernel and of the functions it calls, its constants and
        options.
    meaning : str
        The hash of the first stage's result.
    """

    name: str
    source: str
    meaning: str


def source_of(job: Job) -> str:
    """Return the hash of a variant's sources, constants, types of arguments and options."""
    settle_key(job.kernel)
    return _hash(job.source.hash(), repr(sorted(job.options.items())))


def meaning_of(job: Job, arch: str) -> str:
    """Return the hash of the result of the compiler's first stage for a variant."""
    settle_key(job.kernel)
    text = without_order(without_names(first_stage(job.source, arch, job.options)))
    return _hash(text, repr(sorted(job.options.items())))


def without_names(text: str) -> str:
    """Return the text of a module with the names of functions replaced by numbers."""
    names = dict.fromkeys(re.findall(r"(?<=@)[\w$.]+", text))
    numbers = {name: f"f{number}" for number, name in enumerate(names)}
    return re.sub(r"(?<=@)[\w$.]+", lambda found: numbers[found[0]], text)


def without_order(text: str) -> str:
    """Return the text of a module in a form without the order of constants and arguments.

    Constants are written at their uses. The arguments of the module's one function are numbered by
    their first use. Unused arguments follow, in the order of their types. The arguments of blocks
    inside the function are numbered in the same way.
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
    """Yield lines with constants in place of their names; several blocks may use one name."""
    values: dict[str, str] = {}
    for line in lines:
        if defined := re.fullmatch(r" *(%\w+) = (arith\.constant .*)", line):
            values[defined[1]] = f"({defined[2]})"
        else:
            yield re.sub(r"%\w+", lambda name: values.get(name[0], name[0]), line)


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_DIGITS]


def read(path: Path) -> dict[str, str]:
    """Return the meanings in a file by source hash; none if another Triton wrote the file."""
    if not path.exists():
        return {}
    version, *lines = path.read_text().splitlines()
    if version != _version():
        return {}
    return dict(line.split() for line in lines)


def write(path: Path, found: list[Fingerprint]) -> None:
    """Write the fingerprints of one architecture, sorted by their hashes."""
    lines = sorted(f"{one.source} {one.meaning}" for one in found)
    path.write_text("\n".join((_version(), *lines)) + "\n")


def _version() -> str:
    return f"triton {triton.__version__}"


def fingerprints(arch: str, known: dict[str, str], workers: int) -> Iterator[Fingerprint]:
    """Yield the fingerprint of each variant; the stage does not run for `known` sources."""
    jobs = jobs_of_arch(arch)
    context = multiprocessing.get_context("spawn")  # Triton's compiler starts threads
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
    """Return the hashes of the machine code of variants; "none" for a name of no variant."""
    jobs = {job.name: job for job in jobs_of_arch(arch)}
    return [code_of(jobs[name], arch) if name in jobs else "none" for name in names]


def codes_of_tree(tree: Path, arch: str, names: list[str]) -> list[str]:
    """Return :func:`codes` of another checkout, from a process that imports that checkout."""
    paths = [str(tree / package / "src") for package in ("optimized", "shared")]
    command = [sys.executable, __file__, "--arch", arch, "--code", *names]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def main(arguments: list[str] | None = None) -> int:
    """Compare fingerprints, write them, or print hashes of machine code; return the exit status."""
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
    """Return the variants whose machine code differs from that of `tree`; all without a tree."""
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
    parser.add_argument("--renew", action="store_true", help="write the current fingerprints")
    parser.add_argument(
        "--tree", type=Path, metavar="FOLDER", help="compare machine code with another checkout"
    )
    parser.add_argument("--code", nargs="+", metavar="VARIANT", help="print hashes of machine code")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes; default: one a core")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers: got {options.workers}; allowed: 1 or more")
    if options.tree is not None and not (options.tree / "optimized" / "src").is_dir():
        parser.error(f"--tree: got {options.tree}; allowed: a checkout of this repository")
    if not FOLDER.is_dir():
        parser.error(f"{FOLDER} does not exist; run this command from a clone of the repository")
    if is_interpreting():
        parser.error("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    return options


if __name__ == "__main__":
    sys.exit(main())
