"""Generated schedules, one after the other; each is a seed, so that its number replays it."""

from __future__ import annotations

from dataclasses import dataclass, field

from paged_mla_conformance.traces import TraceCrash, TraceMismatch, TraceTrial
from paged_mla_reference.simulator.coverage import Coverage
from paged_mla_reference.simulator.generated import generated
from paged_mla_shared.backend import Backend
from paged_mla_shared.dims import MlaDims


@dataclass
class Sweep:
    """What became of a run of seeds.

    Parameters
    ----------
    schedules, steps, tokens : int
        Schedules, batches and real query tokens that were asked.
    failures : dict of int to str
        By seed.
    coverage : Coverage
    """

    schedules: int = 0
    steps: int = 0
    tokens: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)

    def run(self, backend: Backend, dims: MlaDims, dtypes: tuple[str, ...], seed: int) -> None:
        """Put schedule `seed` to the backend, in one of the dtypes."""
        trial = TraceTrial(backend, generated(seed), dims, dtypes[seed % len(dtypes)])
        try:
            trial.check()
        except (TraceMismatch, TraceCrash) as failure:
            self.failures[seed] = str(failure)
        self.schedules += 1
        self.steps += trial.steps
        self.tokens += trial.tokens
        self.coverage.add(trial.coverage)
