"""Tests of the checks of bytes before, between and after the elements of tensors."""

from __future__ import annotations

import pytest
import torch

from paged_mla_adapters.guards import Guards, Overwritten


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole allocation that contains a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
@pytest.mark.parametrize("stride", [None, (24, 1), (30, 2)])
def test_a_placed_tensor_is_a_copy(dtype: torch.dtype, stride: tuple[int, int] | None):
    """The copy has the values, strides and alignment that the caller passes."""
    given = torch.arange(30).reshape(3, 10).to(dtype)
    placed = Guards("cpu").place("x", given, stride=stride, offset=8)
    assert torch.equal(placed, given)
    assert placed.stride() == (stride or (10, 1))
    assert placed.data_ptr() % 16 == 8


@pytest.mark.parametrize(
    ("element", "where"),
    [
        (-1, "before x"),
        (-256, "before x"),
        (10, "between the lines of x"),
        (70, "behind x"),
        (300, "behind x"),
    ],
)
def test_a_write_outside_a_tensor_is_found(element: int, where: str):
    """The message counts bytes from the tensor's first byte."""
    guards = Guards("cpu")
    placed = guards.place("x", torch.zeros(3, 10), stride=(24, 1), written=True)
    guards.fill(0xFF)
    placed.fill_(3.0)
    guards.check()
    lost = bytes_of(placed).view(torch.float32)
    lost[256 + element] = 5.0
    said = rf"\[S-10\] attend: 4 bytes written {where}, first at byte {element * 4}: 255 became 0"
    with pytest.raises(Overwritten, match=said):
        guards.check("attend")


def test_a_tensor_that_is_only_read_is_checked_too():
    """A tensor that is only read is checked until the next call of fill."""
    guards = Guards("cpu")
    placed = guards.place("x", torch.zeros(4, dtype=torch.int32))
    guards.fill(7)
    placed[2] = 1
    with pytest.raises(Overwritten, match="the input x was changed in 1 byte, first at byte 8: 0"):
        guards.check()
    guards.fill(7)
    guards.check()


def test_filling_does_not_change_elements():
    """Only margins and gaps are filled."""
    guards = Guards("cpu", margin=256)
    placed = guards.place("x", torch.ones(2, 2), stride=(4, 1))
    guards.fill(0xFF)
    everything = bytes_of(placed).view(torch.float32)
    assert torch.equal(
        everything.isnan().logical_not().nonzero().ravel() - 64, torch.tensor([0, 1, 4, 5])
    )


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), ()])
def test_tensors_without_elements_and_without_axes(shape: tuple[int, ...]):
    """Tensors without elements or axes also have their own allocations."""
    guards = Guards("cpu")
    placed = guards.place("x", torch.ones(shape))
    assert placed.shape == shape
    bytes_of(placed)[-1] = 1
    with pytest.raises(Overwritten, match="behind"):
        guards.check()


def test_without_margins_a_tensor_fills_its_allocation():
    """Tools that check allocations then find every access outside the tensor."""
    placed = Guards("cpu", margin=0).place("x", torch.ones(3, 5), stride=(8, 1))
    assert placed.untyped_storage().nbytes() == 4 * (2 * 8 + 5)


def test_tensors_that_cannot_be_placed():
    """The error names the wrong argument."""
    with pytest.raises(ValueError, match="stride"):
        Guards("cpu").place("x", torch.ones(3, 2), stride=(0, 1))
    with pytest.raises(ValueError, match="margin"):
        Guards("cpu", margin=100)


def test_a_new_tensor_is_checked_on_both_sides():
    """Its elements may be written; the bytes outside are NaN from the start."""
    guards = Guards("cpu", margin=256, filling=0xFF)
    room = guards.empty("the output", (2, 3), torch.float32)
    everything = bytes_of(room).view(torch.float32)
    assert everything[:64].isnan().all()
    assert everything[-64:].isnan().all()
    room.fill_(1.0)
    guards.check()
    everything[:64] = 0
    everything[-1] = 0
    said = "256 bytes written before the output, .*; 4 bytes written behind the output"
    with pytest.raises(Overwritten, match=said):
        guards.check()


def test_a_gap_of_a_written_tensor_may_not_be_written():
    """Also a change of a NaN there to another NaN is found."""
    guards = Guards("cpu", filling=0xFF)
    placed = guards.place("x", torch.zeros(3, 2), stride=(4, 1), written=True)
    placed.as_strided((3, 4), (4, 1))[0, 3] = torch.nan
    with pytest.raises(
        Overwritten, match="4 bytes written between the lines of x, first at byte 12"
    ):
        guards.check()
