"""Cache formats with scales: writing, reading and writing again (S-11)."""

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
    """S-10: every byte of keys and scales is right after an append."""
    trial.check_append()


@pytest.mark.mla(group="formats", ops=("append",), features=("replay",), rules=("S-10", "S-11"))
def test_written_again(trial: Trial) -> None:
    """S-10, S-11: a later append overwrites each row, except the first of several tokens."""
    trial.check_append_again()


def test_read(trial: Trial) -> None:
    """S-5: the output follows from the bytes of the cache, which the oracle wrote."""
    trial.check_attention()


@pytest.mark.mla(group="formats", ops=("gather_context",), rules=("S-11",))
def test_gathered(trial: Trial) -> None:
    """S-11: each gathered value is rounded to float32, then to the model's type."""
    trial.check_read("gather_context")


@pytest.mark.mla(group="formats", ops=("attend",), rules=("S-4", "S-11"))
@pytest.mark.parametrize("code", NAN_CODES, ids=hex)
def test_nan_code(
    mla_run: Run, mla_checks: list[Check], code: int, request: pytest.FixtureRequest
) -> None:
    """S-11: both codes of NaN appear in the outputs of queries that see them, and in no other."""
    asked = trials(mla_run)
    skip_if(request.node, None if asked else Skip("a cache format of 8 bits is not declared"))
    for trial in asked:
        check_nan_code(trial, code)
        mla_checks += trial.checks
