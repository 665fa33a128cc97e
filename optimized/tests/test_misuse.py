"""What holds every address of a kernel against its tensors, for ``test_bounded.py`` too."""

import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

sys.path.append(str(Path(__file__).parents[1] / "tests_misuse"))

from accesses import OutOfBounds, checked_accesses

I32 = torch.int32


@triton.jit
def copy_kernel(source_ptr, target_ptr, source_at, target_at, count, N: tl.constexpr):
    lane = tl.arange(0, N)
    values = tl.load(source_ptr + source_at + lane, mask=lane < count)
    tl.store(target_ptr + target_at + lane, values, mask=lane < count)


@pytest.mark.parametrize(
    ("source_at", "target_at", "count", "message"),
    [
        (
            -1,
            0,
            1,
            "copy_kernel reads 4 bytes outside its tensors, 4 bytes before the start of source_ptr",
        ),
        (6, 0, 2, "reads 4 bytes .*, 0 bytes after the end of source_ptr"),
        (2, 0, 3, "reads 4 bytes .*, in a gap of source_ptr"),
        (0, -2, 1, "writes 4 bytes .*, 8 bytes before the start of target_ptr"),
        (0, 7, 2, "writes 4 bytes .*, 0 bytes after the end of target_ptr"),
    ],
)
def test_an_address_outside_a_tensor_is_found(source_at, target_at, count, message):
    """It ends the launch with the kernel's name, also in the memory around the tensor."""
    source = torch.zeros(32, dtype=I32)[8:].as_strided((2, 3), (4, 1))  # element 3 is a gap
    target = torch.zeros(32, dtype=I32)[8:16]
    with pytest.raises(OutOfBounds, match=message), checked_accesses():
        copy_kernel[(1,)](source, target, source_at, target_at, count, N=8)


def test_addresses_inside_tensors_are_followed():
    """Of masked lanes none counts."""
    source, target = torch.arange(4, dtype=I32), torch.zeros(8, dtype=I32)
    with checked_accesses() as launched:
        copy_kernel[(1,)](source, target, 1, 5, 3, N=8)
    assert launched == ["copy_kernel"]
    assert target.tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
