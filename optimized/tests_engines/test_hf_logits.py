"""transformers: logits over the paged cache match the library's eager logits (S-19, S-21)."""

import pytest
from hf_cases import CASES, assert_case
from hf_models import TINY


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_logits(kind, schedule):
    assert_case(kind, schedule, TINY)
