"""Run a backend on the trace of a simulated engine; the cache persists between steps (S-19)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append, slots_to_write
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_reference.simulator.coverage import Coverage
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.trace import Trace, TraceStep, record, trace_of
from paged_mla_reference.tolerance import caches, compare
from paged_mla_reference.tolerance.compare import Check, Mismatch
from paged_mla_shared.backend import Backend, Runner
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import InvalidArgument, OutOfMemory
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.poison import poisoned_image
from paged_mla_shared.problem import Batch, Mask, Output, Problem


class TraceMismatch(Mismatch):
    """A wrong output in a step of a trace; the message names the step and the token."""

    def __init__(self, trace: Trace, step: TraceStep, cause: Mismatch) -> None:
        place = f"trace {trace.name}, step {step.number}, rank {step.rank}"
        if cause.at and cause.at[0] < len(step.tokens):
            place += f", token {cause.at[0]} ({step.tokens[cause.at[0]]})"
        super().__init__(cause.rule, place, str(cause), cause.at)


class TraceCrash(RuntimeError):
    """An exception of a backend in a step of a trace; the message names the step."""

    def __init__(self, trace: Trace, step: TraceStep, cause: Exception) -> None:
        place = f"trace {trace.name}, step {step.number}, rank {step.rank}"
        super().__init__(f"{place}: {type(cause).__name__}: {cause}")


class RankCache:
    """The cache of one rank: the actual one on the backend, and the expected one.

    There is one runner for each mask. The runner that ran last holds the cache. When another runner
    is needed, the cache is copied to it byte for byte.
    """

    def __init__(self, backend: Backend, trace: Trace) -> None:
        self._runners: dict[Mask, Runner] = {
            mask: backend.prepare(problem) for mask, problem in trace.problems.items()
        }
        self.expected = poisoned_image(trace.problems[Mask.CAUSAL].layout)
        self._holder = Mask.CAUSAL
        self._problem = trace.problems[Mask.CAUSAL]
        self._written = np.zeros(0, np.int64)  # slots
        self._runners[Mask.CAUSAL].load_cache(self.expected)

    def runner(self, mask: Mask) -> Runner:
        """Return the runner of a mask after copying the cache to it."""
        if mask is not self._holder:
            self._runners[mask].load_cache(self.held)
            self._holder = mask
        return self._runners[mask]

    @property
    def held(self) -> CacheImage:
        """The actual cache, read from the runner that holds it."""
        every = np.arange(self.expected.layout.num_blocks, dtype=np.int64)
        blocks = self._runners[self._holder].read_cache(every)
        return replace(self.expected, block_ids=every, blocks=blocks)

    def check(self, held: CacheImage, writer: caches.Writer) -> list[Check]:
        """Compare every byte of the cache with the expected cache (S-10).

        Parameters
        ----------
        held : CacheImage
            The actual cache.
        writer : Writer
            The tokens and slots of the last append.
        """
        self._written = np.union1d(self._written, writer.slots)
        return caches.check_cache(
            held.layout,
            held.block_ids,
            held.blocks,
            self.expected.read(held.block_ids),
            writer,
            rotated=caches.Rotated.of(self._problem, self._written),
        )


class TraceTrial:
    """Runs a scenario on a backend step by step, and keeps the tightest check of each kind.

    Attributes
    ----------
    note : str
        How the scenario was adapted to the backend.
    steps, tokens : int
        How many batches, and how many query tokens without padding, ran so far.
    coverage : Coverage
        The situations that the schedule reached.
    """

    def __init__(
        self, backend: Backend, scenario: Scenario, dims: MlaDims, dtype: str, note: str = ""
    ) -> None:
        self.scenario = scenario
        self.note = note
        self.trace = trace_of(scenario, dims, dtype)
        self._caches = [RankCache(backend, self.trace) for _ in range(self.trace.world)]
        self._partials: list[Output] = []
        self.steps = self.tokens = 0
        self.coverage = Coverage()
        self._tightest: dict[str, Check] = {}

    @property
    def checks(self) -> list[Check]:
        """For each kind of check, the one whose error is closest to its budget."""
        return list(self._tightest.values())

    def check(self) -> int:
        """Run the whole scenario and return the number of its batches.

        Raises
        ------
        TraceMismatch, TraceCrash
            See :meth:`check_step`.
        """
        problem, engine = self.trace.problems[Mask.CAUSAL], Engine(self.scenario.config)
        self.coverage = engine.coverage
        for step in record(self.scenario, problem.dims, problem.dtype, engine):
            self.check_step(step)
        return self.steps

    def check_step(self, step: TraceStep) -> None:
        """Plan, append and attend one step, and compare with the dense output.

        Raises
        ------
        TraceMismatch
            A result is wrong, or the schedule breaks a rule.
        TraceCrash
            The backend raised an exception other than ``OutOfMemory``.
        """
        self.steps += 1
        self.tokens += len(step.tokens)
        try:
            for check in self._run(step):
                self._keep(check)
        except Mismatch as mismatch:
            raise TraceMismatch(self.trace, step, mismatch) from mismatch
        except OutOfMemory:
            raise  # the test of the schedule is skipped
        except Exception as error:
            raise TraceCrash(self.trace, step, error) from error

    def _run(self, step: TraceStep) -> list[Check]:
        problem, cache = self.trace.problems[step.mask], self._caches[step.rank]
        _check_legal(problem, step.batch)
        runner = cache.runner(step.mask)
        expected = metadata(problem, step.batch)
        checks = compare.check_metadata(step.batch, runner.plan(step.batch), expected)
        runner.append(step.batch)
        cache.expected = append(problem, step.batch, cache.expected)
        writer = caches.Writer(step.batch, slots_to_write(problem, step.batch))
        held = cache.held
        checks += cache.check(held, writer)
        answer = runner.attend(step.batch)
        exact, rounded = step.exact, step.rounded
        if (held.blocks != cache.expected.read(held.block_ids)).any():  # another legal rounding
            exact, rounded = (attend(problem, step.batch, held, each) for each in Rounding)
        checks += compare.check_output(problem, step.batch, answer, exact, rounded)
        if self.trace.world > 1:
            checks += self._merge(runner, step, answer)
        return checks

    def _merge(self, runner: Runner, step: TraceStep, answer: Output) -> list[Check]:
        """Merge the partial results of all ranks after the last rank has run (S-8, S-18)."""
        if step.rank == 0:
            self._partials = []
        self._partials.append(Output(answer.out.astype(np.float32), answer.lse))
        if len(self._partials) < self.trace.world:
            return []
        merged = runner.merge(self._partials)
        return compare.check_merge(merged, merge(self._partials), self._partials)

    def _keep(self, check: Check) -> None:
        known = self._tightest.get(check.what)
        if known is None or _share(check) > _share(known):
            self._tightest[check.what] = check


def _check_legal(problem: Problem, batch: Batch) -> None:
    """Check that a step of the schedule follows the rules; a wrong engine makes illegal steps.

    Raises
    ------
    Mismatch
        The block table of the step is illegal (S-13), or another part of the step is (S-2).
    """
    try:
        validate_batch(problem, batch)
    except InvalidArgument as error:
        rule = "S-13" if error.argument == "block_table" else "S-2"
        raise Mismatch(rule, "the schedule's step", str(error)) from error


def _share(check: Check) -> float:
    return check.error / check.budget if check.budget else 0.0
