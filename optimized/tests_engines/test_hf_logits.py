"""transformers: logits over the paged cache beside the library's own eager ones (S-19, S-21)."""

import pytest
from hf_cases import CASES, try_case
from hf_models import TINY


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_logits(kind, schedule, record_property):
    trial = try_case(kind, schedule, TINY)
    record_property("difference", trial.difference)
    record_property("budget", trial.budget)
    print(f"{kind} {schedule}: {trial.difference:.2e} of {trial.budget:.2e}")
    assert trial.compared > 20
    assert trial.difference <= trial.budget
