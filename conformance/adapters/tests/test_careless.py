"""Tests that exactly one guard finds each careless kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paged_mla_adapters.mutants import backends, right
from paged_mla_adapters.mutants.__main__ import main
from paged_mla_adapters.mutants.careless import MUTANTS
from paged_mla_adapters.mutants.guard import GUARDS, SHARED_MEMORY, STREAM
from paged_mla_adapters.mutants.kill import ask, fault_in
from paged_mla_adapters.mutants.page import section, with_section
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.errors import OutOfMemory

PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"


@pytest.mark.parametrize("name", MUTANTS)
def test_its_guard_kills_it(name: str):
    """The step fails with the guard's message, and passes without the guard."""
    if lacking := MUTANTS[name].guard.lacks():
        pytest.skip(f"needs {lacking}")
    assert fault_in(MUTANTS[name]) == ""


def test_every_guard_has_a_mutant():
    """Only kernels that need a GPU may be skipped, with a reason."""
    assert {mutant.guard for mutant in MUTANTS.values()} == set(GUARDS)
    if not torch.cuda.is_available():
        assert {guard for guard in GUARDS if guard.lacks()} == {SHARED_MEMORY, STREAM}


@pytest.mark.parametrize("operation", ["attend", "append", "merge"])
def test_right_kernels_pass_all_guards(operation: str):
    """Right kernels write only their outputs."""
    ask(right.backend(), operation)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("writes-before-the-cache", "64 bytes written before the cache, first at byte -64"),
        ("writes-behind-the-cache", "1 byte written behind the cache"),
        ("writes-behind-a-part-of-the-cache", "4 bytes written behind ckv_cache"),
        ("writes-a-part-of-its-queries", "the input q_pe was changed in .* bytes"),
        ("writes-behind-its-output", "4 bytes written behind the output"),
    ],
)
def test_the_message_names_the_tensor_and_the_place(name: str, said: str):
    """S-10: the message also has the number of bytes."""
    with pytest.raises(Mismatch, match=rf"^\[S-10\] attend: {said}"):
        ask(MUTANTS[name].backend, "attend")


def test_a_kernel_found_by_another_guard_is_not_killed(monkeypatch: pytest.MonkeyPatch):
    """The command returns 1 and prints the message that was found."""
    mutant = MUTANTS["writes-its-queries"]
    monkeypatch.setitem(MUTANTS, mutant.name, changed(mutant, guard=GUARDS[0]))
    assert fault_in(MUTANTS[mutant.name]).startswith("fails, but not by guard zones")
    monkeypatch.setitem(MUTANTS, mutant.name, changed(mutant, kernel=right.attend))
    assert fault_in(MUTANTS[mutant.name]) == "survives"
    assert main([mutant.name]) == 1


def changed(mutant, **changes):
    return type(mutant)(**{**vars(mutant), **changes})


def test_the_command_prints_the_result_of_each_kernel(capsys: pytest.CaptureFixture[str]):
    """The command prints a line for each kernel, also for a skipped one."""
    assert main(["merges-in-place", "launches-on-the-default-stream"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "merges-in-place: killed by watched inputs"
    if not torch.cuda.is_available():
        assert said[1:] == [
            "launches-on-the-default-stream: skipped, it needs a GPU",
            "1 of 2 careless kernels killed, 0 survived, 1 skipped",
        ]
    with pytest.raises(SystemExit):
        main(["no-such-mutant"])


def test_each_careless_kernel_is_a_backend():
    """A user can run the suite on a careless kernel."""
    assert getattr(backends, "merges-in-place")().name == "merges-in-place"
    with pytest.raises(AttributeError, match="no mutant is called"):
        getattr(backends, "no-such-mutant")


def test_the_page_lists_every_careless_kernel():
    """The page has the section of the list; the sections after it do not change."""
    page = PAGE.read_text()
    assert section() in page
    assert with_section(page) == page
    assert with_section(page.replace("writes-its-lengths", "gone")) == page
    assert with_section("# Mutants\n") == f"# Mutants\n\n{section()}"


def test_out_of_memory_is_not_a_failure():
    """The error differs from the error of a failed test."""

    def has_no_memory(_call):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")

    with pytest.raises(OutOfMemory, match="Tried to allocate"):
        ask(right.backend(kernel=has_no_memory), "attend")
