"""A row has the same bits with any other rows in its step (S-20)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.layered import check_layer_bits
from paged_mla_conformance.suite.trials.metamorphic import arrangements, of_rows
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.tolerance import compare
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Output

pytestmark = pytest.mark.mla(group="batch_invariant", ops=("append", "attend"))


def test_batch_invariant(trial: Trial) -> None:
    """S-20: every row of a right output keeps its bits in each arrangement of rows."""
    [step] = build_steps(trial.case, trial.dims, trial.dtype)
    runner, stage = trial.prepare(), Stage.of(step)
    runner.load_cache(stage.after)
    whole = trial.attend(runner, stage)
    for name, rows in arrangements(step.batch).items():
        form = of_rows(step, rows)
        expected = Output(whole.out[form.tokens], whole.lse[form.tokens])
        actual = trial.answer(Stage.of(form.step))
        trial.checks += compare.check_bitwise("S-20", actual, expected, name)


@pytest.mark.mla(group="batch_invariant", ops=("layer",))
def test_batch_invariant_layer(trial: Trial) -> None:
    """S-20: rows of whole layers keep their bits, absorbed and materialized."""
    check_layer_bits(trial)
