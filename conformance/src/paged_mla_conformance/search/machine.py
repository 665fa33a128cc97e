"""Hypothesis drives the simulated engine: it submits and aborts requests and runs steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import Phase, assume, reject, settings
from hypothesis import seed as use_seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paged_mla_conformance.suite.selection.adapt_case import adapt_scenario
from paged_mla_conformance.suite.selection.params import unmet_by_trace
from paged_mla_conformance.suite.trials.traces import TraceCrash, TraceMismatch, TraceTrial
from paged_mla_reference.rules.parallel import UNDIVIDED, ContextParallel
from paged_mla_reference.simulator.audit import Audit, Violation
from paged_mla_reference.simulator.batches import lay_out
from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig, RowOrder
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.generated import fits
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.scenario import Scenario, save_scenario
from paged_mla_reference.simulator.step import Step
from paged_mla_reference.simulator.table import schedule_table
from paged_mla_reference.simulator.trace import Recorder
from paged_mla_shared.backend import Backend
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import OutOfMemory

FAILURES = (TraceMismatch, TraceCrash, Violation)
REPLAY_FILE = "failing-schedule.json"
_TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(tuple)


@st.composite
def engine_configs(draw: st.DrawFn) -> EngineConfig:
    """Draw the configuration of a small engine; simple ones are preferred."""
    drafts = draw(st.none() | _chains() | _trees())
    divisible = drafts is None or drafts.kind is DraftKind.CHAIN
    block_size = draw(st.sampled_from([4, 2, 1, 8, 16]))
    groups = [UNDIVIDED, ContextParallel(2), ContextParallel(3, block_size)]
    group = draw(st.sampled_from(groups if divisible else groups[:1]))
    return EngineConfig(
        block_size=block_size,
        num_blocks=draw(st.integers(1, 12)) + 24 // (block_size * group.world),
        max_rows=draw(st.integers(1, 4)),
        token_budget=draw(st.sampled_from([32, 16, 8])),
        max_chunk=draw(st.sampled_from([32, 5, 1])),
        order=draw(st.sampled_from(list(RowOrder))),
        drafts=drafts,
        buckets=draw(st.sampled_from([(), (4,), (1, 2, 4, 8)])),
        padded_query_len=draw(st.integers(0, 1)),
        group=group,
    )


def _chains() -> st.SearchStrategy[Drafts]:
    kind = st.just(DraftKind.CHAIN)
    return st.builds(Drafts, kind=kind, depth=st.integers(1, 3), multi_step=st.booleans())


def _trees() -> st.SearchStrategy[Drafts]:
    return st.builds(
        Drafts,
        kind=st.just(DraftKind.TREE),
        depth=st.integers(1, 3),
        branches=st.integers(1, 3),
        multi_step=st.booleans(),
    )


class EngineMachine(RuleBasedStateMachine):
    """Drives an engine, its audit and a backend one call at a time."""

    backend: Backend
    dims: MlaDims
    dtype: str
    folder: Path
    failed = False

    @initialize(config=engine_configs())
    def start(self, config: EngineConfig) -> None:
        """Start with an empty engine."""
        drawn = Scenario(name="fuzz", why="found by fuzzing", config=config, requests=())
        self.scenario, _ = adapt_scenario(drawn, self.backend.capabilities)
        self.engine = Engine(self.scenario.config)
        self.audit = Audit(self.engine)
        capabilities = self.backend.capabilities
        assume(not unmet_by_trace(capabilities, self.scenario, self.dims, self.dtype))
        try:
            self.trial = TraceTrial(self.backend, self.scenario, self.dims, self.dtype)
        except OutOfMemory:
            reject()
        self.recorder = Recorder(self.trial.trace, self.engine)
        self.steps: list[Step] = []

    @rule(
        own=_TOKENS,
        output=_TOKENS,
        fork=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 20)),
        salt=st.sampled_from([(), (), ("salt",)]),
    )
    def submit(
        self,
        own: tuple[int, ...],
        output: tuple[int, ...],
        fork: tuple[int, int] | None,
        salt: tuple[str, ...],
    ) -> None:
        """Submit a prompt; it may start with the first tokens of an earlier request."""
        earlier = self.scenario.requests
        if fork is not None and earlier:
            own = earlier[fork[0] % len(earlier)].tokens[: fork[1]] + own
        request = Request(f"r{len(earlier)}", own, output, len(self.steps), salt)
        if fits(self.engine.config, request):
            self.engine.submit(request)
            self.scenario = replace(self.scenario, requests=(*earlier, request))

    @precondition(lambda self: self.scenario.requests)
    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        """Abort a request, unless it was already aborted."""
        requests = list(self.scenario.requests)
        which %= len(requests)
        if requests[which].abort is None:
            self.engine.abort(requests[which].id)
            requests[which] = replace(requests[which], abort=len(self.steps))
            self.scenario = replace(self.scenario, requests=tuple(requests))

    @rule(count=st.integers(1, 4))
    def run(self, count: int) -> None:
        """Run `count` steps."""
        for _ in range(count):
            self._step()

    def teardown(self) -> None:
        """Finish every request and check that the engine is empty."""
        if self.failed:
            return
        while self.engine.busy:
            self._step()
        aborted = {request.id for request in self.scenario.requests if request.abort is not None}
        self.audit.check_end(aborted)

    def _step(self) -> None:
        step = self.engine.step()
        self.steps.append(step)
        try:
            self.audit.check_step(step, lay_out(step.rows))
            for recorded in self.recorder.record(step):
                self.trial.check_step(recorded)
        except OutOfMemory:
            self.failed = True  # teardown then runs no more steps
            reject()
        except FAILURES as failure:
            self.failed = True
            path = self.folder / REPLAY_FILE
            save_scenario(self.scenario, path)
            failure.add_note(f"{schedule_table(self.steps)}\nreplay file: {path}")
            raise


def search(
    backend: Backend, dims: MlaDims, dtype: str, folder: Path, *, examples: int, seed: int
) -> None:
    """Search for a failing schedule with hypothesis; raise the error of the smallest one found.

    Parameters
    ----------
    backend : Backend
    dims : MlaDims
    dtype : str
    folder : Path
        The folder for the replay file of a failure.
    examples : int
        The number of schedules to try.
    seed : int

    Raises
    ------
    TraceMismatch, TraceCrash or Violation
        Its notes contain a table of the schedule and the path of the replay file.
    """
    fixed = {"backend": backend, "dims": dims, "dtype": dtype, "folder": folder}
    machine = use_seed(seed)(type("EngineMachine", (EngineMachine,), fixed))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),  # the phase "explain" is slow
        ),
    )
