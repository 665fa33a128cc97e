"""Run draws on the backend: the suite judges each step, and the launches determine its family.

A draw runs as the suite runs a case (``Trial.check_step``): for each step, one runner loads the
cache, plans, appends and attends, and each output has the suite's own budget.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from combinations import PORTABLE_PREFILL, PREFILL, Combination
from drawing import Draw

from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_optimized.backend import create
from paged_mla_optimized.backend.eager import EagerRunner
from paged_mla_optimized.backend.graphed import GraphedRunner
from paged_mla_optimized.backend.mapped import MappedRunner
from paged_mla_optimized.backend.portable import PortableRunner
from paged_mla_optimized.operations.attend.hopper import HopperAttention
from paged_mla_optimized.operations.attend.portable import PortableAttention
from paged_mla_optimized.operations.prefill.hopper import HopperPrefill
from paged_mla_optimized.operations.prefill.portable import PortablePrefill
from paged_mla_optimized.planning.families import PORTABLE
from paged_mla_optimized.planning.plan import Plan
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases import PrefillCase
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Batch, Output

RUNNERS: dict[str, type[EagerRunner]] = {
    "eager": EagerRunner,
    "graphed": GraphedRunner,
    "mapped": MappedRunner,
    "portable": PortableRunner,
}
MOST_BYTES = 3 << 30
"""Of device memory, for one process."""

_launched: dict[Any, str] = {}  # family by what chose it: a plan and its variant, or a prefill


@dataclass
class Outcome:
    """What became of a draw.

    Parameters
    ----------
    combination : Combination
    number : int
    reached : list of Combination
        One for each step that was right.
    labels : dict of str to str
        Of the configuration.
    failure : str
        Empty where every step was right.
    is_fatal : bool
        Whether the process that ran the draw cannot be used any more.
    out_of_memory : bool
        Whether the draw was given up for want of memory, which is no failure.
    seconds : float
    """

    combination: Combination
    number: int
    reached: list[Combination] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    failure: str = ""
    is_fatal: bool = False
    out_of_memory: bool = False
    seconds: float = 0.0


def ask(drawn: Draw) -> Outcome:
    """Run a draw; return its outcome."""
    watch_launches()
    began = time.perf_counter()
    outcome = Outcome(drawn.combination, drawn.number, labels=drawn.labels())
    journal = _Journal()
    try:
        _check(drawn, journal)
    except torch.OutOfMemoryError:
        outcome.out_of_memory = outcome.is_fatal = True  # what a broken capture left is in doubt
    except Exception as error:  # a backend may raise anything
        outcome.failure = _described(drawn, journal.begun - 1, error)
        outcome.is_fatal = not isinstance(error, Mismatch)
    outcome.reached = [
        Combination(family, drawn.combination.cache_format, drawn.combination.mode)
        for family in journal.right
        if family
    ]
    outcome.seconds = time.perf_counter() - began
    _launched.clear()
    gc.collect()
    if torch.cuda.is_available() and not outcome.is_fatal:
        torch.cuda.empty_cache()
    return outcome


def limit_memory() -> None:
    """Let this process have its share of the device alone."""
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, MOST_BYTES / whole))


@cache
def watch_launches() -> None:
    """Have each launch of attention leave the name of its family."""

    def watch(launcher: type, family_of: Callable[[Any], str]) -> None:
        launch = launcher.launch  # type: ignore[attr-defined]

        def watched(self: Any, *arguments: Any, **named: Any) -> None:
            plan = next((a for a in arguments if isinstance(a, Plan)), None)
            _launched[None if plan is None else (id(plan), plan.host.choice)] = family_of(self)
            launch(self, *arguments, **named)

        launcher.launch = watched  # type: ignore[attr-defined]

    watch(HopperAttention, lambda launcher: launcher.variant.family)
    watch(PortableAttention, lambda _: PORTABLE)
    watch(HopperPrefill, lambda _: PREFILL)
    watch(PortablePrefill, lambda _: PORTABLE_PREFILL)


@dataclass
class _Journal:
    """Families of the steps that were right; a step is right once the next one begins."""

    right: list[str] = field(default_factory=list)
    begun: int = 0
    latest: str = ""

    def begin(self) -> None:
        self.end()
        self.begun += 1

    def end(self) -> None:
        if self.begun:
            self.right.append(self.latest)
        self.latest = ""


def _check(drawn: Draw, journal: _Journal) -> None:
    """Run every step of a draw."""
    runner = _watched(RUNNERS[drawn.runner], journal)
    backend = replace(create(), settings=drawn.settings, runner=runner)
    trial = Trial(backend, drawn.case, drawn.dims, drawn.dtype)
    if isinstance(drawn.case, PrefillCase):
        prepared = trial.prepare()
        for batch in build_prefills(drawn.case, drawn.dims, drawn.dtype):
            trial.prefill(prepared, batch)
    else:
        trial.check_step()
    journal.end()


def _watched(runner: type[EagerRunner], journal: _Journal) -> type[EagerRunner]:
    """Return a runner that notes which family served each step."""

    class Watched(runner):  # type: ignore[misc, valid-type]
        def load_cache(self, image: CacheImage) -> None:
            journal.begin()
            super().load_cache(image)

        def attend(self, batch: Batch) -> Output:
            answer: Output = super().attend(batch)
            plan = self._mla._core.plan  # after a replay too it has what the step was served by
            journal.latest = _launched.get((id(plan), plan.host.choice), "")
            return answer

        def prefill(self, batch: PrefillBatch) -> Output:
            journal.begin()
            _launched.clear()
            answer: Output = super().prefill(batch)
            journal.latest = _launched.get(None, "")  # none for no token
            return answer

    return Watched


def _described(drawn: Draw, step: int, error: Exception) -> str:
    """Describe a failure; the text has a traceback unless an output was wrong."""
    case = drawn.case
    told = f"{type(error).__name__}: {error}"
    if not isinstance(error, Mismatch):
        told += "\n" + "".join(traceback.format_tb(error.__traceback__)[-4:]).rstrip()
    where = "before any step"
    if step >= 0:
        rows = ", ".join(f"({row.seq_len}, {row.query_len})" for row in case.steps[step])
        where = f"step {step} of {len(case.steps)}, rows (seq_len, query_len) {rows}"
    about = ", ".join(f"{subject} {value}" for subject, value in drawn.labels().items())
    return f"{where}\n{about}\n{told}"
