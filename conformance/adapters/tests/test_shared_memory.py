"""Tests of the kernel that fills shared memory: compiled without a GPU, and run on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from paged_mla_adapters.surroundings.shared_memory import NAN, fill_shared_memory

HOPPER_BYTES = 227 * 1024  # the most shared memory of a program on compute capability 9.0

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Gluon has no interpreter", allow_module_level=True)
triton = pytest.importorskip("triton")
compiler = pytest.importorskip("triton.backends.compiler")
gluon = pytest.importorskip("triton.experimental.gluon._runtime")
shared_memory = pytest.importorskip("paged_mla_adapters.surroundings.kernels.shared_memory")


def test_the_kernel_writes_all_shared_memory_of_a_hopper_gpu():
    """The kernel compiled for this GPU allocates all shared memory and has the stores."""
    pieces = HOPPER_BYTES // shared_memory.PIECE
    source = gluon.GluonASTSource(
        shared_memory.fill_shared_memory,
        {"read_ptr": "*i32", "at": "i32", "PIECES": "constexpr", "WORD": "constexpr"},
        {(2,): pieces, (3,): NAN},
        {},
    )
    kernel = triton.compile(
        source, target=compiler.GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )
    assert kernel.metadata.shared == HOPPER_BYTES
    assert "stmatrix" in kernel.asm["ptx"] or "st.shared" in kernel.asm["ptx"]
    assert kernel.asm["cubin"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_kernel_that_reads_unwritten_shared_memory_reads_nan():
    """The reader runs on every multiprocessor and allocates all shared memory.

    Another process that uses the GPU between the two kernels clears shared memory. One of twenty
    tries without such a process is enough.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    pieces = properties.shared_memory_per_block_optin // 1024
    read = torch.zeros(properties.multi_processor_count, dtype=torch.float32, device=device)

    def is_nan(at: int) -> bool:
        fill_shared_memory(device)
        shared_memory.read_shared_memory[(len(read),)](read, at, PIECES=pieces, num_warps=4)
        return bool(read.isnan().all())

    for at in (0, pieces // 2, pieces - 1):
        assert any(is_nan(at) for _ in range(20))
