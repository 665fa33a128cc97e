"""A step of a layer has the same output absorbed, materialized, whole and in parts (S-21)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.both_forms import check_both_forms
from paged_mla_conformance.suite.trials.layered import check_layer
from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="layer", ops=("prefill", "attend"))


def test_layer(trial: Trial) -> None:
    check_both_forms(trial)


@pytest.mark.mla(group="layer", ops=("layer",))
def test_layer_whole(trial: Trial) -> None:
    check_layer(trial)
