"""transformers at DeepSeek-V3's head sizes: the tests of ``tests_engines`` for small sizes."""

import sys
from pathlib import Path

import pytest
from ci.installed import import_or_skip

import_or_skip("transformers", module_level=True)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests_engines"))

from hf_cases import CASES, assert_case  # noqa: E402 - behind a skip and its path
from hf_generation import WAYS, assert_way  # noqa: E402 - behind a skip and its path
from hf_models import REAL  # noqa: E402 - behind a skip and its path


@pytest.mark.parametrize(("kind", "schedule"), CASES)
def test_logits(kind, schedule):
    """S-19, S-21: within the budget of the library's own eager logits, in float32 and bfloat16."""
    assert_case(kind, schedule, REAL)


@pytest.mark.parametrize("way", WAYS)
def test_generates_the_same(way):
    """S-19: equal tokens in float32."""
    assert_way(way, REAL)
