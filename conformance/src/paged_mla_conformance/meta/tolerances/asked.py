"""The cases that run on mutants: all cases whose tests attend to the cache, except large ones.

The oracle's outputs are the same for every mutant; a process computes them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.suite.selection.benchmark import ATTENDED, expressed
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.params import params_of_group, why_skip
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.dims import SMALL
from paged_mla_shared.problem import Output

_DIMS = "small"


@dataclass(frozen=True)
class Asked:
    """A case with its right outputs.

    Parameters
    ----------
    trial : Trial
        The trial of a right backend.
    expressed : bool
        Whether a definition of FlashInfer-Bench can express the case.
    steps : tuple of (Stage, Output)
        The stages of the case, each with its right output.
    """

    trial: Trial
    expressed: bool
    steps: tuple[tuple[Stage, Output], ...]


@cache
def asked(capabilities: Capabilities) -> tuple[Asked, ...]:
    """Return the cases for a backend with these capabilities; small cases come first."""
    right = MutantBackend(capabilities=capabilities)
    run = Run(right, "", _DIMS, load_profile(STRICT), tuple(sorted(capabilities.dtypes)))
    params = [param for group in ATTENDED for param in params_of_group(run, group)]
    found = []
    for param in params:
        if param.case.is_large or why_skip(run, param, ("attend",)) is not None:
            continue
        trial = Trial(right, param.case, SMALL, param.dtype)
        runner, steps = trial.prepare(), []
        for stage in trial.stages():
            runner.load_cache(stage.after)
            steps.append((stage, runner.attend(stage.batch)))
        plain = param.case.cache_format is None
        found.append(Asked(trial, plain and not expressed(param.case)[1], tuple(steps)))
    return tuple(sorted(found, key=_size))


def _size(case: Asked) -> int:
    return sum(int(stage.batch.seq_lens.sum()) + right.out.size for stage, right in case.steps)
