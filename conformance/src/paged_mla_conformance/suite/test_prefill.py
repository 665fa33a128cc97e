"""Attention over keys and values of every head, in one piece and in chunks (S-21)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.bad_prefills import BAD_PREFILLS, BASE, BadPrefill
from paged_mla_conformance.bending import bent_case
from paged_mla_conformance.profile import Run
from paged_mla_conformance.trial import Trial
from paged_mla_shared.prefill_inputs import build_prefills

pytestmark = pytest.mark.mla(group="prefill", ops=("prefill",))


def test_prefill(trial: Trial) -> None:
    trial.check_prefill()


@pytest.mark.mla(group="prefill", ops=("prefill", "validation"), rules=("S-4", "S-21"))
@pytest.mark.parametrize("bad", BAD_PREFILLS, ids=lambda bad: bad.name)
def test_bad_prefill(mla_run: Run, bad: BadPrefill) -> None:
    """A prefill no rule allows is refused, and the runner keeps its use."""
    case, note = bent_case(BASE, mla_run.backend.capabilities)
    trial = Trial(mla_run.backend, case, mla_run.dims, mla_run.dtypes[0], note)
    runner = trial.prepare()
    [good] = build_prefills(case, trial.dims, trial.dtype)
    with pytest.raises(ValueError, match=bad.argument):
        runner.prefill(bad.spoil(good))
    trial.prefill(runner, good)
