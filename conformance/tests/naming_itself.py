"""A backend that refuses each huge cache with an error that names the process."""

from __future__ import annotations

import os
import time

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_shared.backend import Runner
from paged_mla_shared.problem import Problem


def _refuse_huge(problem: Problem, runner: Runner) -> Runner:
    if problem.num_blocks * problem.layout.block_bytes > 2**30:
        time.sleep(1)  # other processes have time to prepare a huge cache too
        raise RuntimeError(f"prepared in process {os.getpid()}")
    return runner


def create() -> MutantBackend:
    return MutantBackend(name="naming-itself", wrap=_refuse_huge)
