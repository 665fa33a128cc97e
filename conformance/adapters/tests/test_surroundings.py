"""Tests of the environment variable that turns surroundings off."""

from __future__ import annotations

import pytest
import torch

from paged_mla_adapters.call import AnyCall
from paged_mla_adapters.mutants.careless import MUTANTS
from paged_mla_adapters.mutants.kill import ask
from paged_mla_adapters.surroundings.calls import Bare, Surroundings, surroundings
from paged_mla_adapters.surroundings.margins import FILLING, guards_of
from paged_mla_adapters.surroundings.room import BareRoom
from paged_mla_adapters.surroundings.switch import BUFFERS, GUARD_ZONES, VALUES, VARIABLE
from paged_mla_adapters.surroundings.uninitialized import uninitialized_is_nan
from paged_mla_conformance.run import nan_origins


@pytest.mark.parametrize(
    "name", ["writes-its-queries", "writes-a-part-of-its-queries", "adds-to-what-is-uninitialized"]
)
def test_a_careless_kernel_passes_without_surroundings(name: str, monkeypatch: pytest.MonkeyPatch):
    """Surroundings find these kernels; they can be turned off to compare times."""
    monkeypatch.setenv(VARIABLE, "off")
    assert isinstance(surroundings("cpu"), Bare)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # new memory is mostly 0
    ask(MUTANTS[name].backend, "attend")


def test_another_value_of_the_variable_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """The error names the variable, its value, and the values that are allowed."""
    assert isinstance(surroundings("cpu"), Surroundings)
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(
        ValueError, match="PAGED_MLA_SURROUNDINGS: got 'no'; allowed: on, off, zeros-in-"
    ):
        surroundings("cpu")


def test_the_suite_and_the_surroundings_name_the_same_values():
    """The suite does not import this package, so it has the names a second time."""
    assert VARIABLE == nan_origins.SURROUNDINGS
    assert set(nan_origins.ZEROS_IN) == set(VALUES) - {"on", "off"}


def test_memory_holds_zeros_where_these_are_chosen(monkeypatch: pytest.MonkeyPatch):
    """Each value removes NaN from one kind of memory, and from no other."""
    cpu = torch.device("cpu")

    def is_nan() -> dict[str, bool]:
        with uninitialized_is_nan():
            empty = [torch.empty(4), torch.empty_like(torch.ones(4)), torch.ones(4).new_empty(4)]
        buffer = AnyCall(room=BareRoom(cpu)).buffer("the output", (4,))
        zone = guards_of(cpu).place("q", torch.ones(4)).storage_offset()
        assert len({bool(tensor.isnan().all()) for tensor in empty}) == 1
        memory = guards_of(cpu).place("q", torch.ones(4)).untyped_storage()
        assert zone > 0
        return {
            BUFFERS: bool(buffer.isnan().all()) and bool(empty[0].isnan().all()),
            GUARD_ZONES: memory[0] == FILLING,
        }

    assert is_nan() == {BUFFERS: True, GUARD_ZONES: True}
    monkeypatch.setenv(VARIABLE, BUFFERS)
    assert is_nan() == {BUFFERS: False, GUARD_ZONES: True}
    monkeypatch.setenv(VARIABLE, GUARD_ZONES)
    assert is_nan() == {BUFFERS: True, GUARD_ZONES: False}
