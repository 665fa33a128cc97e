"""Which kernel variants exist for an architecture, as the compiler wants them described.

The folder of each operation says which variants of its kernels there are, in ``jobs.py``; so do
``planning`` and ``serving`` of theirs. Every combination of what shapes code is compiled once.

Numbers that are compiled in, ``num_heads``, block size, capacities, and the widths of kernels that
take any, have too many values for that. Most are factors and divisors, for which ptxas still orders
instructions in ways of their own, so each variant takes one value of each by turns, see
``planning/axes.py``.

Tensors and their strides are aligned to 16, and the blocks of a cache follow each other.
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
    """Return every distinct variant of every kernel, each by a name of its own.

    A name that another variant has goes on with what is not that one's.
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

    Those two are the first variant and one from the middle of the list.
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
    """Yield what a variant has, and another one of its name has not."""
    one = dict(first.features())
    for name, value in job.features():
        if one.get(name) != value:
            yield f"{name}{value}"


def _jobs(arch: str) -> Iterator[Job]:
    """Yield variants of every kernel, some of them several times."""
    folders = [folder.name for folder in pkgutil.iter_modules(operations.__path__) if folder.ispkg]
    packages = [f"{operations.__name__}.{name}" for name in folders]
    for package in (*packages, planning.__name__, serving.__name__):
        jobs = importlib.import_module(f"{package}.jobs").jobs
        yield from (Job(*variant) for variant in jobs(arch))
