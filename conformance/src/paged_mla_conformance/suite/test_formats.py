"""Cache formats with scales: what is written, what is read, what is written again (S-11)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.bad_inputs.nan_codes import NAN_CODES, check_nan_code, trials
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.items import skip_if
from paged_mla_conformance.suite.selection.params import Skip
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.tolerance.compare import Check

pytestmark = pytest.mark.mla(group="formats", ops=("append", "attend"), rules=("S-10", "S-11"))


@pytest.mark.mla(group="formats", ops=("append",), rules=("S-10", "S-11"))
def test_written(trial: Trial) -> None:
    """S-10: every byte of rows and scales."""
    trial.check_append()


@pytest.mark.mla(group="formats", ops=("append",), features=("replay",), rules=("S-10", "S-11"))
def test_written_again(trial: Trial) -> None:
    """S-10, S-11: drafts past the first of each row run again, as other tokens."""
    trial.check_append_again()


def test_read(trial: Trial) -> None:
    """S-5: the answer is that of the bytes, whoever wrote them."""
    trial.check_attention()


@pytest.mark.mla(group="formats", ops=("gather_context",), rules=("S-11",))
def test_gathered(trial: Trial) -> None:
    """S-11: each value rounded to float32, then to the model's type."""
    trial.check_read("gather_context")


@pytest.mark.mla(group="formats", ops=("attend",), rules=("S-4", "S-11"))
@pytest.mark.parametrize("code", NAN_CODES, ids=hex)
def test_nan_code(
    mla_run: Run, mla_checks: list[Check], code: int, request: pytest.FixtureRequest
) -> None:
    """S-11: both codes that are no number show in the answers that see them, in no other."""
    asked = trials(mla_run)
    skip_if(request.node, None if asked else Skip("no cache format of 8 bits declared"))
    for trial in asked:
        check_nan_code(trial, code)
        mla_checks += trial.checks
