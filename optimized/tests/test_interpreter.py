"""What Triton's interpreter is spared, and that nothing else of it changes."""

from dataclasses import replace

import pytest
import torch
import triton
from triton import language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter

from paged_mla_optimized.triton_compat.unseen_work import check_overflow_where_reported


@triton.jit
def largest(values):
    """Return the largest value, by a function of the language that is itself written in it."""
    return tl.max(values, 0)


@triton.jit
def largest_kernel(out_ptr, values_ptr, TIMES: tl.constexpr, VALUES: tl.constexpr):
    """Load the largest value several times."""
    values = tl.load(values_ptr + tl.arange(0, VALUES))
    for time in range(TIMES):
        tl.store(out_ptr + time, largest(values))


def ask(times: int) -> torch.Tensor:
    """Launch one program."""
    out = torch.zeros(times, dtype=torch.int32)
    values = torch.tensor([3, 7, 5, 1], dtype=torch.int32)
    largest_kernel[(1,)](out, values, TIMES=times, VALUES=4)
    return out


def test_calls_in_a_program_do_not_search_the_language(monkeypatch):
    """A launch looks through its parts, however many functions its programs call."""
    ask(1)  # what is looked through once in a process
    looked, getmembers = [], interpreter.inspect.getmembers
    monkeypatch.setattr(
        interpreter.inspect, "getmembers", lambda part: looked.append(part) or getmembers(part)
    )
    assert ask(5).tolist() == [7] * 5
    assert len(looked) == len(set(looked)) > 0


def test_the_language_is_restored():
    """Outside a launch its functions are Triton's own."""
    ask(1)
    assert is_builtin(tl.load)
    assert is_builtin(tl.tensor.__add__)


@pytest.mark.parametrize("debug", [True, False])
def test_overflow_is_computed_where_it_is_reported(monkeypatch, debug):
    """Integers are checked if the check can fail a program, and only then."""
    builder = interpreter.interpreter_builder
    options = interpreter.InterpreterOptions()
    monkeypatch.setattr(builder, "options", replace(options, debug=debug))
    check_overflow_where_reported()
    assert builder.options.sanitize_overflow == debug
