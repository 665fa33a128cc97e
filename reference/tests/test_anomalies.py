"""Numbers that are none, and infinite ones: which rule they break (S-6, S-7, S-9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paged_mla_reference.rules.attention import Answer, attend
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.materialize import materialize
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.tolerance.compare import Mismatch, check_output
from paged_mla_shared.cases import CASES
from paged_mla_shared.dims import SMALL
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Batch, Output, Problem

SEES_KEYS, PADDED = 0, -1  # tokens


def answered(group: str, name: str) -> tuple[tuple[Problem, Batch, Answer, Answer], Output]:
    """Return the inputs of a comparison for a case, and a correct output."""
    [case] = [case for case in CASES[group] if case.name == name]
    [step] = build_steps(case, SMALL, "float32")
    batch, before = materialize(step)
    after = append(step.problem, batch, before)
    exact, rounded = (attend(step.problem, batch, after, each) for each in Rounding)
    actual = rounded.output("float32")
    check_output(step.problem, batch, actual, exact, rounded)
    return (step.problem, batch, exact, rounded), actual


@pytest.mark.parametrize(
    ("name", "token", "value", "rule"),
    [
        ("out", SEES_KEYS, np.nan, "S-9"),
        ("out", PADDED, np.nan, "S-6"),
        ("lse", SEES_KEYS, np.nan, "S-9"),
        ("lse", SEES_KEYS, -np.inf, "S-7"),
        ("lse", SEES_KEYS, np.inf, "S-7"),
        ("lse", PADDED, np.nan, "S-6"),
        ("lse", PADDED, 0.0, "S-6"),
    ],
)
def test_which_rule_an_anomaly_breaks(name: str, token: int, value: float, rule: str):
    """S-6, S-7, S-9: by whether the query sees keys."""
    asked, actual = answered("empty", "padded-tokens")
    assert np.isneginf(asked[2].lse[token]).all() == (token == PADDED)
    getattr(actual, name)[token] = value
    with pytest.raises(Mismatch) as raised:
        check_output(*asked[:2], actual, *asked[2:])
    assert raised.value.rule == rule
    assert str(raised.value).startswith(f"[{rule}] {name}: {value:g}")
    assert ("its exact lse is" in str(raised.value)) == (name == "out" and token == SEES_KEYS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lse: 0.25 * lse, "; every lse is 0.25 times the exact lse"),
        (lambda lse: lse / np.log(2), "; every lse is right in base 2,"),
        (lambda lse: lse + 1, ""),
    ],
)
def test_a_factor_of_every_lse_is_named(change: Callable[[Any], Any], said: str):
    """S-7: a scale that is applied twice, or another base, is one number."""
    asked, actual = answered("exact", "one-key-h5")
    actual = replace(actual, lse=change(actual.lse).astype(np.float32))
    with pytest.raises(Mismatch) as raised:
        check_output(*asked[:2], actual, *asked[2:])
    assert raised.value.rule == "S-7"
    assert said in str(raised.value)
    assert ("every lse is" in str(raised.value)) == bool(said)
