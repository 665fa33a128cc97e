"""The switch that turns surroundings off."""

from __future__ import annotations

import pytest
import torch

from paged_mla_adapters.mutants.careless import MUTANTS
from paged_mla_adapters.mutants.kill import ask
from paged_mla_adapters.surroundings.calls import Bare, Surroundings, surroundings
from paged_mla_adapters.surroundings.switch import VARIABLE


@pytest.mark.parametrize(
    "name", ["writes-its-queries", "writes-a-part-of-its-queries", "adds-to-what-is-uninitialized"]
)
def test_without_surroundings_it_passes_unnoticed(name: str, monkeypatch: pytest.MonkeyPatch):
    """That is what they are for; times can be compared without them."""
    monkeypatch.setenv(VARIABLE, "off")
    assert isinstance(surroundings("cpu"), Bare)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # as fresh memory mostly is
    ask(MUTANTS[name].backend, "attend")


def test_the_switch_has_two_values(monkeypatch: pytest.MonkeyPatch):
    """A misspelt one is refused by name."""
    assert isinstance(surroundings("cpu"), Surroundings)
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(ValueError, match="PAGED_MLA_SURROUNDINGS: got 'no'; allowed: on, off"):
        surroundings("cpu")
