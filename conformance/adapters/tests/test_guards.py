"""Bytes around tensors are watched, in front of them, between their lines and behind them."""

from __future__ import annotations

import pytest
import torch

from paged_mla_adapters.guards import Guards, Overwritten


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole allocation that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("stride", [None, (24, 1), (30, 2)])
def test_a_placed_tensor_is_a_copy(dtype: torch.dtype, stride: tuple[int, int] | None):
    """It has the numbers, the strides and the alignment that were asked for."""
    given = torch.arange(30).reshape(3, 10).to(dtype)
    placed = Guards("cpu").place("x", given, stride=stride, offset=8)
    assert torch.equal(placed, given)
    assert placed.stride() == (stride or (10, 1))
    assert placed.data_ptr() % 16 == 8


@pytest.mark.parametrize(
    ("element", "where"),
    [(-1, "in front of"), (-256, "in front of"), (10, "between"), (70, "behind"), (300, "behind")],
)
def test_a_write_beside_a_tensor_is_found(element: int, where: str):
    """The message counts bytes from the tensor's first one."""
    guards = Guards("cpu")
    placed = guards.place("x", torch.zeros(3, 10), stride=(24, 1), written=True)
    guards.fill(0xFF)
    placed.fill_(3.0)
    guards.check()
    lost = bytes_of(placed).view(torch.float32)
    lost[256 + element] = 5.0
    with pytest.raises(Overwritten, match=rf"x: byte {element * 4}, {where}.*; 3 more"):
        guards.check()


def test_a_tensor_that_is_only_read_is_watched_too():
    """Until the next filling, which takes contents as they are."""
    guards = Guards("cpu")
    placed = guards.place("x", torch.zeros(4, dtype=torch.int32))
    guards.fill(7)
    placed[2] = 1
    with pytest.raises(Overwritten, match="x: byte 8, of a tensor that is only read, was 0"):
        guards.check()
    guards.fill(7)
    guards.check()


def test_filling_leaves_elements_alone():
    """Margins and gaps alone are filled."""
    guards = Guards("cpu", margin=256)
    placed = guards.place("x", torch.ones(2, 2), stride=(4, 1))
    guards.fill(0xFF)
    everything = bytes_of(placed).view(torch.float32)
    assert torch.equal(
        everything.isnan().logical_not().nonzero().ravel() - 64, torch.tensor([0, 1, 4, 5])
    )


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), ()])
def test_tensors_of_no_element_and_of_no_axis(shape: tuple[int, ...]):
    """They have allocations of their own too."""
    guards = Guards("cpu")
    placed = guards.place("x", torch.ones(shape))
    assert placed.shape == shape
    bytes_of(placed)[-1] = 1
    with pytest.raises(Overwritten, match="behind"):
        guards.check()


def test_without_margins_a_tensor_fills_its_allocation():
    """Tools that watch allocations then see every access beside it."""
    placed = Guards("cpu", margin=0).place("x", torch.ones(3, 5), stride=(8, 1))
    assert placed.untyped_storage().nbytes() == 4 * (2 * 8 + 5)


def test_what_cannot_be_placed():
    """Refused by name."""
    with pytest.raises(ValueError, match="stride"):
        Guards("cpu").place("x", torch.ones(3, 2), stride=(0, 1))
    with pytest.raises(ValueError, match="margin"):
        Guards("cpu", margin=100)
