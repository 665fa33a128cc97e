"""Attention over keys and values of every head, in one piece and in chunks (S-21)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.bad_inputs.prefills import BAD_PREFILLS, BASE, BadPrefill
from paged_mla_conformance.suite.selection.adapt_case import adapt_case
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.items import skip_if
from paged_mla_conformance.suite.selection.params import why_undeclared
from paged_mla_conformance.suite.trials.metamorphic import arrangements, of_prefill_rows
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.tolerance import compare
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Output

pytestmark = pytest.mark.mla(group="prefill", ops=("prefill",))


def test_prefill(trial: Trial) -> None:
    """S-21: outputs are right. S-20: if ``batch_invariant`` is declared, rows keep their bits."""
    answers = trial.check_prefill()
    if "batch_invariant" not in trial.backend.capabilities.features:
        return
    for batch, whole in answers:
        for name, rows in arrangements(batch).items():
            some, tokens = of_prefill_rows(batch, rows)
            expected = Output(whole.out[tokens], whole.lse[tokens])
            actual = trial.prepare().prefill(some)
            trial.checks += compare.check_bitwise("S-20", actual, expected, name)


@pytest.mark.mla(
    group="prefill",
    ops=("prefill",),
    features=("validation", "mixed", "padding"),
    rules=("S-4", "S-21"),
)
@pytest.mark.parametrize("bad", BAD_PREFILLS, ids=lambda bad: bad.name)
def test_bad_prefill(mla_run: Run, bad: BadPrefill, request: pytest.FixtureRequest) -> None:
    """An illegal prefill is refused, and the runner stays usable."""
    case, note = adapt_case(BASE, mla_run.backend.capabilities)
    skip_if(request.node, why_undeclared(mla_run, case, mla_run.dtypes[0], ("prefill",)))
    trial = Trial(mla_run.backend, case, mla_run.dims, mla_run.dtypes[0], note)
    runner = trial.prepare()
    [good] = build_prefills(case, trial.dims, trial.dtype)
    with pytest.raises(ValueError, match=bad.argument):
        runner.prefill(bad.spoil(good))
    trial.prefill(runner, good)
