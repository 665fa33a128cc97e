"""Tests that uninitialized memory of torch is NaN inside the context, and only there."""

from __future__ import annotations

import warnings

import pytest
import torch

from paged_mla_adapters.surroundings.uninitialized import uninitialized_is_nan

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_nan(dtype: torch.dtype):
    """All functions that return uninitialized tensors return NaN."""
    like = torch.zeros(3, dtype=dtype)
    with uninitialized_is_nan():
        made = (
            torch.empty(3, dtype=dtype),
            torch.empty_like(like),
            like.new_empty(3),
            torch.empty_strided((3,), (2,), dtype=dtype),
        )
    for tensor in made:
        assert tensor.float().isnan().all()


def test_integers_are_large():
    """The values are legal neither as an index nor as a length."""
    with uninitialized_is_nan():
        assert torch.empty(1, dtype=torch.int32).item() == 2**31 - 1


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_mode_ends_with_the_call(before: tuple[bool, bool]):
    """The settings of torch are restored also if the call fails."""
    on, warn_only = before
    try:
        torch.use_deterministic_algorithms(on, warn_only=warn_only)
        with pytest.raises(KeyError), uninitialized_is_nan():
            raise KeyError
        now = torch.are_deterministic_algorithms_enabled()
        assert (now, torch.is_deterministic_algorithms_warn_only_enabled()) == before
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_nondeterministic_operations_run_without_a_warning():
    """The deterministic mode does not warn about operations of a kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with uninitialized_is_nan():
            filled = torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    assert filled.tolist() == [1, 0]
