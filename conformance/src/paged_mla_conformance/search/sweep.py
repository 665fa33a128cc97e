"""Run numbered schedules and cases. A number is a seed, so that each can run again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paged_mla_conformance.search.corpus import ASKED, check_case, save_case
from paged_mla_conformance.search.production import production_case
from paged_mla_conformance.search.shrink import shrunk
from paged_mla_conformance.search.sizes import Size, sizes_of
from paged_mla_conformance.suite.selection.adapt_case import adapt_case, adapt_scenario
from paged_mla_conformance.suite.selection.params import unmet_by_case, unmet_by_trace
from paged_mla_conformance.suite.trials.traces import TraceCrash, TraceMismatch, TraceTrial
from paged_mla_reference.simulator.coverage import Coverage, Situation
from paged_mla_reference.simulator.generated import generated
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases import Case
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import OutOfMemory


@dataclass
class Sweep:
    """The results of numbered schedules and cases.

    Parameters
    ----------
    schedules, steps, tokens : int
        How many schedules, batches, and query tokens without padding ran.
    cases : int
        How many cases of production sizes ran.
    undeclared : int
        How many schedules and cases the backend does not support.
    without_memory : int
        How many schedules and cases were skipped because the device has too little memory.
    failures : dict of str to str
        The messages of failures, by "schedule N" or "production case N".
    coverage : Coverage
        The situations that the schedules reached.
    sizes : Counter of Size
        How many cases are in each size class.
    """

    schedules: int = 0
    steps: int = 0
    tokens: int = 0
    cases: int = 0
    undeclared: int = 0
    without_memory: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)
    sizes: Counter[Size] = field(default_factory=Counter)

    def run(self, backend: Backend, dims: MlaDims, dtypes: tuple[str, ...], seed: int) -> None:
        """Run the schedule with number `seed` on the backend, in one of the dtypes."""
        scenario, note = adapt_scenario(generated(seed), backend.capabilities)
        dtype = dtypes[seed % len(dtypes)]
        if unmet_by_trace(backend.capabilities, scenario, dims, dtype):
            self.undeclared += 1
            return
        try:
            trial = TraceTrial(backend, scenario, dims, dtype, note)
            trial.check()
        except (TraceMismatch, TraceCrash) as failure:
            self.failures[f"schedule {seed}"] = str(failure)
        except OutOfMemory:
            self.without_memory += 1
            return
        self.schedules += 1
        self.steps += trial.steps
        self.tokens += trial.tokens
        self.coverage.add(trial.coverage)

    def run_case(
        self,
        backend: Backend,
        dims: MlaDims,
        dtypes: tuple[str, ...],
        number: int,
        folder: Path = Path(),
    ) -> None:
        """Run production case `number` on the backend, in one of the dtypes.

        A failing case is made smaller and written to a replay file in `folder`.
        """
        case, _ = adapt_case(production_case(number), backend.capabilities)
        dtype = dtypes[number % len(dtypes)]
        if unmet_by_case(backend.capabilities, case, dims, dtype, ASKED):
            self.undeclared += 1
            return

        def failure(tried: Case) -> str:
            if unmet_by_case(backend.capabilities, tried, dims, dtype, ASKED):
                return ""
            try:
                check_case(backend, tried, dims, dtype)
            except OutOfMemory:
                self.without_memory += tried is case
            except Exception as error:  # a backend may raise anything
                return f"{type(error).__name__}: {error}"
            return ""

        skipped = self.without_memory
        message = failure(case)
        if self.without_memory > skipped:
            return
        self.cases += 1
        self.sizes.update(sizes_of(case))
        if message:
            case = shrunk(case, lambda smaller: bool(failure(smaller)))
            path = folder / f"failing-production-{number}.json"
            save_case(case, dtype, path)
            said = f"{failure(case)}\n{case}\n{dtype}, replay file: {path}"
            self.failures[f"production case {number}"] = said

    def add(self, other: Sweep) -> None:
        """Add the results of another sweep."""
        for name in ("schedules", "steps", "tokens", "cases", "undeclared", "without_memory"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures |= other.failures
        self.coverage.add(other.coverage)
        self.sizes.update(other.sizes)

    def table(self) -> str:
        """Return how often each situation and each size class was reached, one per line."""
        situations = [self.coverage.table()] if self.schedules else []
        sizes = [f"{self.sizes[size]:>4}  {size}" for size in Size] if self.cases else []
        return "\n".join([*situations, *sizes])

    def summary(self) -> str:
        """Return one line with the numbers of runs, of missing situations and of failures."""
        said = []
        if self.schedules:
            missing = len(self.coverage.missing)
            said.append(f"{self.schedules} schedules, {self.steps} steps, {self.tokens} tokens")
            said.append(f"{missing} of {len(Situation)} situations not reached")
        if self.cases:
            missing = sum(not self.sizes[size] for size in Size)
            said.append(f"{self.cases} cases of production sizes")
            said.append(f"{missing} of {len(Size)} size classes not reached")
        if self.undeclared:
            said.append(f"{self.undeclared} not supported")
        if self.without_memory:
            said.append(f"{self.without_memory} skipped (too little memory)")
        return ", ".join([*said, f"{len(self.failures)} failures"])
