"""The kernel variants of an architecture, as jobs for the compiler.

``jobs.py`` in the folder of each operation, in ``planning`` and in ``serving`` lists the variants
of its kernels. Every combination of values that affect the code is compiled once.

Numbers that are compiled in have too many values for that: ``num_heads``, block size, capacities,
and the widths of kernels that support any width. Most are factors and divisors, but ptxas orders
instructions differently for them. Each variant therefore uses one value of each number, and the
values alternate between variants; see ``planning/axes.py``.

Tensors and their strides are aligned to 16, and the blocks of a cache are contiguous.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

from paged_mla_optimized import operations, planning, serving
from paged_mla_optimized.planning.families import FAMILIES
from paged_mla_optimized.tools.aot_job import Job
from paged_mla_optimized.triton_compat.kernels import name_of

_ATTEND = {"attend_kernel", *(f"decode_{family}_kernel" for family in FAMILIES)}
_SAMPLED_ATTEND = 2


def jobs_of_arch(arch: str) -> list[Job]:
    """Return every distinct variant of every kernel, each with a unique name.

    If two variants have the same name, the features that differ are added to the second name.
    """
    jobs: dict[str, Job] = {}
    seen = set()
    for job in _jobs(arch):
        if job.identity in seen:
            continue
        seen.add(job.identity)
        first = jobs.setdefault(job.name, job)
        if first is not job:
            name = "-".join((job.name, *_differences(first, job)))
            if name in jobs:
                raise RuntimeError(f"two variants for {arch} have the name {name}")
            jobs[name] = replace(job, name=name)
    return list(jobs.values())


def sample_of(jobs: list[Job]) -> list[Job]:
    """Return one variant of each kernel, and two of each attend kernel, the same in every run.

    The two variants are the first one and one from the middle of the list.
    """
    by_kernel: dict[str, list[Job]] = {}
    for job in jobs:
        by_kernel.setdefault(name_of(job.kernel), []).append(job)
    chosen: dict[str, Job] = {}
    for kernel, all_ in by_kernel.items():
        count = _SAMPLED_ATTEND if kernel in _ATTEND else 1
        chosen |= {job.name: job for job in all_[:: -(-len(all_) // count)]}
    return list(chosen.values())


def _differences(first: Job, job: Job) -> Iterator[str]:
    """Yield the features of `job` that differ from those of `first`."""
    one = dict(first.features())
    for name, value in job.features():
        if one.get(name) != value:
            yield f"{name}{value}"


def _jobs(arch: str) -> Iterator[Job]:
    """Yield the variants of every kernel, some of them several times."""
    folders = [folder.name for folder in pkgutil.iter_modules(operations.__path__) if folder.ispkg]
    packages = [f"{operations.__name__}.{name}" for name in folders]
    for package in (*packages, planning.__name__, serving.__name__):
        jobs = importlib.import_module(f"{package}.jobs").jobs
        yield from (Job(*variant) for variant in jobs(arch))
