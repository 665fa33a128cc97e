"""The steps of a schedule with their expected outputs, one after the other (S-19)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import validate_problem
from paged_mla_reference.simulator.batches import batch_of, rank_batches
from paged_mla_reference.simulator.dense import Dense
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.model import Histories, ModelStandIn
from paged_mla_reference.simulator.scenario import Scenario, drive
from paged_mla_reference.simulator.step import Step
from paged_mla_reference.simulator.work import check_answers, check_arrays
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.problem import Batch, Mask, Problem


@dataclass(frozen=True)
class Token:
    """The description of a query token, for messages.

    Parameters
    ----------
    request, kind : str
        The id of the request and the kind of the row.
    index : int
        Number of tokens before it in its row, cached tokens and query tokens.
    """

    request: str
    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.request}, index {self.index}"


@dataclass(frozen=True)
class TraceStep:
    """One batch and its expected outputs.

    Parameters
    ----------
    number : int
        Number of the engine step; the batches of all its ranks are consecutive.
    rank : int
        The rank whose cache the batch reads and writes.
    mask : Mask
        Selects the trace's problem of the batch.
    batch : Batch
    exact, rounded : Answer
        The output of dense attention in float64, and rounded where the specification rounds.
    tokens : tuple of Token
        The query tokens of real rows; T may be larger.
    """

    number: int
    rank: int
    mask: Mask
    batch: Batch
    exact: Answer
    rounded: Answer
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Trace:
    """The common values of all steps of a run.

    Parameters
    ----------
    name : str
    problems : dict of Mask to Problem
        One problem for each mask of the steps. All problems use the same cache, so their cache
        parameters are equal.
    world : int
        Number of ranks; each has its own cache.
    """

    name: str
    problems: dict[Mask, Problem]
    world: int


def trace_of(scenario: Scenario, dims: MlaDims, dtype: str) -> Trace:
    """Return the trace of a scenario, without its steps, for the dims and dtype of a model.

    Raises
    ------
    InvalidArgument
        The rules forbid the problem.
    """
    masks = [Mask.CAUSAL, Mask.TREE] if scenario.has_trees else [Mask.CAUSAL]
    problems = {mask: scenario.problem(dims, dtype, mask) for mask in masks}
    for problem in problems.values():
        validate_problem(problem)
    return Trace(scenario.name, problems, scenario.config.group.world)


class Recorder:
    """Converts engine steps to trace steps.

    Parameters
    ----------
    trace : Trace
    engine : Engine
        The engine that makes the steps.
    """

    def __init__(self, trace: Trace, engine: Engine) -> None:
        problem = trace.problems[Mask.CAUSAL]
        self._trace = trace
        self._engine = engine
        self._histories = Histories()
        self._model = ModelStandIn(problem.dims, problem.dtype)
        self._dense = Dense(problem, self._model, self._histories)
        self._seen: set[str] = set()
        self._pairs = self._batches = 0  # a pair: a query and a key; a batch: a step and a rank

    def record(self, step: Step) -> Iterator[TraceStep]:
        """Yield one trace step per rank.

        Raises
        ------
        InvalidArgument
            The outputs up to this step are too much work, or the step is too large.
        """
        problem, group = self._trace.problems[step.mask], self._engine.config.group
        pairs = sum(row.query_len * (row.context_len + row.query_len) for row in step.rows)
        self._pairs += pairs * group.world
        self._batches += group.world
        check_answers(self._pairs, self._batches, problem.dims)
        check_arrays(
            step.number,
            problem.dims,
            world=group.world,
            num_tokens=step.num_tokens,
            num_rows=step.num_rows,
            blocks=(row.blocks for row in step.rows),
        )
        whole = batch_of(problem, step, self._model, self._histories)
        tokens = tuple(
            Token(row.request.id, row.kind, row.context_len + i)
            for row in step.rows
            for i in range(row.query_len)
        )
        for rank, batch in enumerate(rank_batches(problem, whole, group)):
            exact, rounded = (
                self._dense.answer(step.rows, batch.num_tokens, rounding, group, rank)
                for rounding in (Rounding.EXACT, Rounding.SPEC)
            )
            yield TraceStep(step.number, rank, step.mask, batch, exact, rounded, tokens)
        self._forget_the_finished(step)

    def _forget_the_finished(self, step: Step) -> None:
        self._seen |= {row.request.id for row in step.rows}
        for request_id in self._seen - self._engine.live:
            self._histories.forget(request_id)
            self._dense.forget(request_id)
            self._seen.discard(request_id)


def record(
    scenario: Scenario, dims: MlaDims, dtype: str, engine: Engine | None = None
) -> Iterator[TraceStep]:
    """Run a scenario and yield its trace steps, without keeping earlier steps.

    Parameters
    ----------
    scenario : Scenario
    dims : MlaDims
    dtype : str
    engine : Engine, optional
        A new engine with the scenario's config, for callers that read its state.

    Raises
    ------
    InvalidArgument
        The rules forbid the problem, or the steps are too much work.
    """
    engine = engine or Engine(scenario.config)
    recorder = Recorder(trace_of(scenario, dims, dtype), engine)
    for step in drive(engine, scenario.requests):
        yield from recorder.record(step)
