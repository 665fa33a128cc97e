"""Masks of a scalar's condition and a tensor's, in the interpreter."""

import torch
import triton
import triton.language as tl

from paged_mla_optimized.runtime.device import device_facts


@triton.jit
def _store_some(out_ptr, num_rows, num_columns, N: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, N)
    tl.store(out_ptr + row * N + column, 1, mask=(row < num_rows) & (column < num_columns))


def test_a_scalars_condition_masks_with_a_tensors():
    device_facts(torch.device("cpu"))  # as an instance asks for them
    out = torch.zeros(3, 4, dtype=torch.int32)
    _store_some[(3,)](out, 2, 3, 4)
    assert out.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
