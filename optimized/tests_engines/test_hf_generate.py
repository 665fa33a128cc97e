"""transformers: tokens generated in float32 are those of the library's own attention."""

import pytest
from hf_generation import WAYS, assert_way
from hf_models import TINY


@pytest.mark.parametrize("way", WAYS)
def test_generates_the_same(way):
    assert_way(way, TINY)
