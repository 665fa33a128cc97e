"""transformers: logits over the paged cache beside the library's own eager ones (S-19, S-21)."""

import pytest
from hf_cases import CASES, assert_case
from hf_models import TINY


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_logits(kind, schedule):
    assert_case(kind, schedule, TINY)
