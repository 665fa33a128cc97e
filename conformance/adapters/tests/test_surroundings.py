"""What lies around a call finds each kind of careless kernel, by its name, and no right one."""

from __future__ import annotations

import plain_kernels
import pytest
import torch

from paged_mla_adapters.surroundings.calls import Bare, Surroundings, surroundings
from paged_mla_adapters.surroundings.switch import VARIABLE
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases import CASES
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.errors import OutOfMemory

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def _mode(monkeypatch: pytest.MonkeyPatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def attended(kernel) -> Trial:
    """Put one step of decode to a kernel as the suite does."""
    [case] = [case for case in CASES["decode"] if case.id == "decode-h8"]
    trial = Trial(plain_kernels.backend_of(kernel), case, PRESETS["small"], "float32")
    trial.check_step()
    return trial


def test_a_right_kernel_raises_no_alarm():
    """Everything that it writes is its own."""
    assert attended(plain_kernels.attend).checks


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("writes_before_the_cache", "64 bytes written before the cache, first at byte -64"),
        ("writes_behind_the_cache", "1 byte written behind the cache"),
        ("writes_its_queries", "the input q was changed in .* bytes"),
        ("writes_behind_its_output", "4 bytes written behind the output"),
    ],
)
def test_a_write_beside_its_tensors_breaks_a_rule(kernel: str, said: str):
    """S-10: the message names the tensor, the place and the number of bytes."""
    with pytest.raises(Mismatch, match=rf"^\[S-10\] attend: {said}"):
        attended(getattr(plain_kernels, kernel))


def test_what_nobody_initialised_is_nan():
    """Luck with what lay there is no answer."""
    with pytest.raises(Mismatch, match=r"S-9.*nan"):
        attended(plain_kernels.adds_to_what_is_uninitialized)


@pytest.mark.parametrize("kernel", ["writes_its_queries", "adds_to_what_is_uninitialized"])
def test_without_surroundings_it_passes_unnoticed(kernel: str, monkeypatch: pytest.MonkeyPatch):
    """That is what they are for; times can be compared without them."""
    monkeypatch.setenv(VARIABLE, "off")
    assert isinstance(surroundings("cpu"), Bare)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # as fresh memory mostly is
    assert attended(getattr(plain_kernels, kernel)).checks


def test_the_switch_has_two_values(monkeypatch: pytest.MonkeyPatch):
    """A misspelt one is refused by name."""
    assert isinstance(surroundings("cpu"), Surroundings)
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(ValueError, match="PAGED_MLA_SURROUNDINGS: got 'no'; allowed: on, off"):
        surroundings("cpu")


def test_out_of_memory_is_no_answer():
    """It is told apart from every failure."""
    with pytest.raises(OutOfMemory, match="Tried to allocate"):
        attended(plain_kernels.has_no_memory)


@NEEDS_GPU
def test_shared_memory_that_nobody_wrote_is_nan():
    """Luck with what an earlier kernel left there is no answer."""
    with pytest.raises(Mismatch, match=r"S-9.*nan"):
        attended(plain_kernels.reads_shared_memory_that_it_did_not_write)


@NEEDS_GPU
def test_a_launch_on_the_default_stream_reads_poison():
    """Inputs come late on the stream of the call."""
    with pytest.raises(Mismatch):
        attended(plain_kernels.launches_on_the_default_stream)
