"""Run one case on one backend: load the cache, call the backend and compare its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.runners.decoy import decoy_problem
from paged_mla_conformance.runners.interleaved_runner import InterleavedRunner
from paged_mla_conformance.suite.trials.sampling import asked_tokens
from paged_mla_reference.oracle import RIGHT
from paged_mla_reference.rules import chunked
from paged_mla_reference.rules.attention import Answer, attend
from paged_mla_reference.rules.cache import append, slots_to_write
from paged_mla_reference.rules.masks import keys_seen
from paged_mla_reference.rules.materialize import materialize, respelt
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.queries import quantize_queries
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.tolerance import budgets, caches, compare
from paged_mla_reference.tolerance.compare import Check
from paged_mla_reference.tolerance.fast import Allowance, fast_answers, may_be_fast
from paged_mla_reference.tolerance.queries import check_queries
from paged_mla_reference.tolerance.short import check_short
from paged_mla_reference.tolerance.single import check_single, equal_values, keys_of_sums, lone_keys
from paged_mla_shared.backend import OPERATIONS, Backend, Runner
from paged_mla_shared.cases import Case, PrefillCase, QueryCase
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.inputs import Step, build_steps
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Batch, Output, Problem
from paged_mla_shared.query_inputs import build_queries

MAX_BLOCKS_READ = 4096  # larger caches are not read back whole


@dataclass(frozen=True)
class Stage:
    """A step for a backend: its problem and batch, and the cache before and after the append."""

    problem: Problem
    batch: Batch
    before: CacheImage
    after: CacheImage

    @classmethod
    def of(cls, step: Step) -> Stage:
        """Build the stage of `step` with the reference."""
        batch, before = materialize(step)
        return cls(step.problem, batch, before, append(step.problem, batch, before))

    def answers(self, asked: NDArray[np.bool_] | None = None) -> tuple[Answer, Answer]:
        """Return the oracle's outputs: exact, and rounded where the specification rounds.

        Parameters
        ----------
        asked : bool [T], optional
            The query tokens to compute; by default all of them.
        """
        problem, batch, image = self.problem, self.batch, self.after
        exact = attend(problem, batch, image, Rounding.EXACT, asked)
        return exact, attend(problem, batch, image, Rounding.SPEC, asked)


@dataclass
class Trial:
    """A case in given dims and dtype on a backend.

    Parameters
    ----------
    backend : Backend
    case : Case
    dims : MlaDims
    dtype : str
    note : str
        How the case was adapted to the backend.
    checks : list of Check
        The comparisons that passed; methods append to it and raise ``Mismatch`` otherwise.
    """

    backend: Backend
    case: Case
    dims: MlaDims
    dtype: str
    note: str = ""
    checks: list[Check] = field(default_factory=list)

    def stages(self) -> list[Stage]:
        """Return the stage of every step of the case."""
        return [Stage.of(step) for step in build_steps(self.case, self.dims, self.dtype)]

    @property
    def problem(self) -> Problem:
        """The problem of the case."""
        return self.case.problem(self.dims, self.dtype)

    def prepare(self) -> Runner:
        """Prepare a runner of the case's problem."""
        return self.backend.prepare(self.problem)

    def prepare_first(self) -> Runner:
        """Prepare a runner of the case's problem, then one of another problem.

        If the backend declares plans, the other runner plans between the calls of the returned
        runner. If the case has a huge cache, no other runner is prepared.
        """
        runner, problem, capabilities = self.prepare(), self.problem, self.backend.capabilities
        if self.case.cache_elements:
            return runner
        other = self.backend.prepare(decoy_problem(problem, capabilities))
        return InterleavedRunner(problem, runner, other) if "plan" in capabilities.ops else runner

    def check_metadata(self) -> None:
        """Plan every step; positions and slots must be exact."""
        runner = self.prepare()
        for stage in self.stages():
            self._plan(runner, stage)

    def check_append(self) -> None:
        """Append every step; every byte of the cache must be right."""
        runner = self.prepare()
        for stage in self.stages():
            runner.load_cache(stage.before)
            self.append(runner, stage)

    def check_append_again(self) -> None:
        """Append every step, then append other tokens in place of its later ones (S-10, S-11)."""
        runner = self.prepare()
        for stage in self.stages():
            runner.load_cache(stage.before)
            cached = self.append(runner, stage).after  # keeps the backend's own legal roundings
            again = others_past_the_first(stage.batch)
            after = append(stage.problem, again, cached)
            self.append(runner, Stage(stage.problem, again, cached, after))

    def check_attention(self) -> None:
        """Attend to a cache that the oracle filled; no byte of it may change."""
        runner = self.prepare()
        for stage in self.stages():
            runner.load_cache(stage.after)
            self.attend(runner, stage)
            self.compare_cache(runner, stage, is_written=False)

    def check_step(self) -> list[Output]:
        """Plan, append and attend every step on one runner; return the outputs."""
        runner = self.prepare()
        answers: list[Output] = []
        for stage in self.stages():
            runner.load_cache(stage.before)
            self._plan(runner, stage)
            answers.append(self.attend(runner, self.append(runner, stage)))
        return answers

    def check_replay(self) -> None:
        """Check that every step on one runner gives the bits that a new runner gives (S-17)."""
        answers = self.check_step()
        for number, (stage, answer) in enumerate(zip(self.stages(), answers, strict=True)):
            fresh = self.prepare()
            fresh.load_cache(stage.before)
            fresh.append(stage.batch)
            self.check_fresh(answer, fresh.attend(stage.batch), f"step {number}")

    def check_fresh(self, answer: Output, fresh: Output, what: str) -> None:
        """Compare an output bit for bit with the output of a new runner."""
        why = f"{what}, compared with a new runner"
        self.checks += compare.check_bitwise("S-17", answer, fresh, why)

    def check_beside(self) -> None:
        """Append and attend every step, interleaved with a runner of another problem."""
        runner, problem = (
            self.prepare_first(),
            decoy_problem(self.problem, self.backend.capabilities),
        )
        other = self.backend.prepare(problem)
        for stage in self.stages():
            runner.load_cache(stage.before)
            other.load_cache(replace(stage.before, layout=problem.layout))
            written = self.append(runner, stage)
            other.append(stage.batch)
            other.attend(stage.batch)
            self.attend(runner, written)

    def check_read(self, name: str) -> None:
        """Check an operation that reads rows, bit for bit; no byte of the cache may change."""
        runner = self.prepare_first()
        for stage in self.stages():
            runner.load_cache(stage.after)
            actual = getattr(runner, name)(stage.batch)
            expected = getattr(RIGHT, name)(stage.problem, stage.batch, stage.after)
            self.checks += caches.check_read(OPERATIONS[name], actual, expected)
            self.compare_cache(runner, stage, is_written=False)

    def check_queries(self) -> None:
        """Quantize the queries of every step; codes and scales must be exact unless rotated."""
        assert isinstance(self.case, QueryCase)
        runner = self.prepare_first()
        batches = build_queries(self.case, self.dims, self.dtype)
        for built, scale in zip(batches, self.case.scales, strict=True):
            batch = respelt(self.problem, built)
            actual = runner.quantize_queries(batch, scale)
            expected = quantize_queries(self.problem, batch, scale)
            self.checks += check_queries(self.problem, batch, actual, expected, given=scale)

    def check_prefill(self) -> list[tuple[PrefillBatch, Output]]:
        """Attend to keys and values of every head, and return the batches with their outputs.

        If the case has a workspace, the context is also attended to in chunks. Later steps of a
        runner must have the bits of a new runner (S-17).
        """
        assert isinstance(self.case, PrefillCase)
        runner, answers = self.prepare_first(), []
        for number, batch in enumerate(build_prefills(self.case, self.dims, self.dtype)):
            answer = self.prefill(runner, batch).answer
            answers.append((batch, answer))
            if self.case.then:
                self.check_fresh(answer, self.prepare().prefill(batch), f"step {number}")
            if self.case.workspace:
                self._check_chunks(runner, batch, self.case.workspace)
        return answers

    def _check_chunks(self, runner: Runner, batch: PrefillBatch, workspace: int) -> None:
        """Check the output over each part of the keys, and the merged output (S-8, S-21)."""
        parts = [self.prefill(runner, part) for part in chunked.parts_of(batch, workspace)]
        merged = chunked.merge_parts([part.answer for part in parts])
        whole = prefill(self.problem, batch, Rounding.EXACT).output("float32")
        seen = np.isfinite(whole.lse).all(axis=1)  # other queries see no key in any part
        out, lse = budgets.chunk_budget(parts)
        self.checks += compare.check_same(
            "S-21",
            Output(merged.out[seen], merged.lse[seen]),
            Output(whole.out[seen], whole.lse[seen]),
            (out[seen], lse[seen]),
        )

    def prefill(self, runner: Runner, batch: PrefillBatch) -> budgets.Part:
        """Attend to keys and values on a runner; return the output, after a check, and budgets."""
        problem, actual = self.problem, runner.prefill(batch)
        exact, rounded = (prefill(problem, batch, rounding) for rounding in Rounding)
        self.checks += compare.check_output(problem, batch, actual, exact, rounded)
        self.checks += check_single(problem, actual, exact, lone_keys(batch))
        keys, terms = keys_of_tokens(batch), batch.query_width
        return budgets.Part(
            actual,
            exact,
            budgets.out_budget(problem.dtype, exact, rounded, keys, terms),
            budgets.lse_budget(exact, rounded, keys, terms),
        )

    def check_bits_kept(self, stage: Stage, changed: Batch, affected: Sequence[bool]) -> None:
        """Check that exactly the `affected` tokens of `stage` and `changed` differ (S-4).

        Parameters
        ----------
        stage : Stage
            The step to attend.
        changed : Batch
            The same step with other keys in some tokens.
        affected : sequence of bool
            For each query token, whether it sees a changed key.
        """
        runner = self.prepare()
        runner.load_cache(stage.before)
        runner.append(stage.batch)
        answer = runner.attend(stage.batch)
        runner.load_cache(stage.before)
        runner.append(changed)
        again = runner.attend(changed)
        for token, may_differ in enumerate(affected):
            same = answer.out[token].tobytes() == again.out[token].tobytes()
            if same == bool(may_differ):
                verb = "did not change when a visible" if may_differ else "changed when an unseen"
                raise compare.Mismatch("S-4", "out", f"token {token} {verb} token changed")
        self.checks.append(Check("bits kept", 0.0, 0.0))

    def answer(self, stage: Stage) -> Output:
        """Append and attend `stage` on a new runner and return the output without a check."""
        runner = self.backend.prepare(stage.problem)
        runner.load_cache(stage.before)
        runner.append(stage.batch)
        return runner.attend(stage.batch)

    def check_same(
        self,
        rule: str,
        stage: Stage,
        tokens: NDArray[np.int64],
        whole: Output,
        again: Output,
    ) -> None:
        """Compare two outputs for some tokens of `stage`; each may be as far off as its budget.

        Parameters
        ----------
        rule : str
            The rule that a difference breaks.
        stage : Stage
        tokens : int64 [n]
            The tokens of `stage` that `again` contains.
        whole : Output
            The output of all tokens of `stage`.
        again : Output
            Another output of the n tokens.
        """
        allowed = compare.both_budgets(stage.problem, stage.batch, *stage.answers())
        mine = Output(whole.out[tokens], whole.lse[tokens])
        self.checks += compare.check_same(
            rule, again, mine, (allowed[0][tokens], allowed[1][tokens])
        )

    def _plan(self, runner: Runner, stage: Stage) -> None:
        expected = metadata(stage.problem, stage.batch)
        actual = runner.plan(stage.batch)
        self.checks += compare.check_metadata(stage.batch, actual, expected)

    def append(self, runner: Runner, stage: Stage) -> Stage:
        """Append `stage` on a runner whose cache is ``stage.before``; every byte must be right.

        Return the stage with the cache of the runner, because it may round rotated keys in another
        legal way (S-12).
        """
        kept = stage.batch.ckv.tobytes(), stage.batch.k_pe.tobytes()
        runner.append(stage.batch)
        if kept != (stage.batch.ckv.tobytes(), stage.batch.k_pe.tobytes()):
            raise compare.Mismatch("S-10", "ckv or k_pe", "append changed its inputs")
        return replace(stage, after=self.compare_cache(runner, stage, is_written=True))

    def attend(self, runner: Runner, stage: Stage) -> Output:
        """Attend `stage` on a runner whose cache contains its keys; compare with the oracle."""
        actual = runner.attend(stage.batch)
        self.hold(stage, actual)
        return actual

    def hold(self, stage: Stage, actual: Output) -> None:
        """Compare the output of `stage` with the oracle's output."""
        problem, batch = stage.problem, stage.batch
        exact, rounded, allowance = self.answers(stage, asked_tokens(problem, batch))
        seen = keys_seen(problem, batch)
        counts = equal_values(problem, batch, stage.after, seen)
        keys = keys_of_sums(problem, batch, counts)
        self.checks += compare.check_output(
            problem, batch, actual, exact, rounded, allowance=allowance, keys=keys
        )
        if allowance is None:
            self.checks += check_single(problem, actual, exact, counts)
            self.checks += check_short(problem, seen, actual, exact, rounded)

    def answers(
        self, stage: Stage, asked: NDArray[np.bool_] | None
    ) -> tuple[Answer, Answer, Allowance | None]:
        """Return the exact and the rounded output, and the allowance for fast products, if any."""
        exact, rounded = stage.answers(asked)
        if not may_be_fast(stage.problem, self.backend.capabilities.products):
            return exact, rounded, None
        return exact, *fast_answers(stage.problem, stage.batch, stage.after, asked)

    def compare_cache(self, runner: Runner, stage: Stage, *, is_written: bool) -> CacheImage:
        """Compare every byte of a runner's cache with ``stage.after``; return the runner's cache.

        Parameters
        ----------
        runner : Runner
        stage : Stage
        is_written : bool
            Whether the runner wrote the tokens of the step, and not the oracle.
        """
        block_ids = _blocks_to_read(stage.after)
        slots = slots_to_write(stage.problem, stage.batch)
        actual = runner.read_cache(block_ids)
        self.checks += caches.check_cache(
            stage.after.layout,
            block_ids,
            actual,
            stage.after.read(block_ids),
            caches.Writer(stage.batch, slots),
            rotated=caches.Rotated.of(stage.problem, slots) if is_written else None,
        )
        blocks = actual[np.searchsorted(block_ids, stage.after.block_ids)]
        return replace(stage.after, blocks=blocks)


def _blocks_to_read(image: CacheImage) -> NDArray[np.int64]:
    """Return the ids of the blocks to compare: all of a small cache, else some of them.

    These are the live blocks, their aliases, and the first and the last block of the cache. An
    offset that overflows 32 bits is wrong by 2^31 or 2^32 elements or bytes. A block id that
    overflows 16 or 24 bits is wrong by as many blocks. The blocks at these distances are aliases.
    """
    total = image.layout.num_blocks
    if total <= MAX_BLOCKS_READ:
        return np.arange(total, dtype=np.int64)
    wraps = np.array([2**31, 2**32, 2**33, 2**34]) // image.layout.block_stride
    wraps = np.concatenate([wraps, [2**16, 2**24]])  # overflows of the block id
    near = image.block_ids[:, None] - wraps[None, :]
    aliases = (near[:, :, None] + np.array([-1, 0, 1])).ravel()
    wanted = np.unique(np.concatenate([image.block_ids, aliases, [0, total - 1]]))
    return wanted[(wanted >= 0) & (wanted < total)].astype(np.int64)


def others_past_the_first(batch: Batch) -> Batch:
    """Return the step with doubled keys and without the first token of each row of several."""
    longer = batch.query_lens > 1
    first = batch.cu_seqlens_q[:-1][longer]
    arrays = {
        name: np.delete(getattr(batch, name), first, axis=0)
        for name in ("q_nope", "q_pe", "ckv", "k_pe")
    }
    arrays |= {name: arrays[name] + arrays[name] for name in ("ckv", "k_pe")}
    ends = np.cumsum(batch.query_lens - longer)
    return replace(batch, cu_seqlens_q=np.append(0, ends).astype(np.int32), **arrays)
