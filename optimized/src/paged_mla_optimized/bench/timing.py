"""Times of replayed graphs, and the ceilings of the device they run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.testing import do_bench, do_bench_cudagraph


def microseconds(launch: Callable[[], Any]) -> float:
    """Return the median time of one call inside a replayed CUDA graph."""
    launch()  # compiles
    torch.cuda.synchronize()
    return float(do_bench_cudagraph(launch, rep=40, return_mode="median")) * 1e3


def ceilings() -> dict[str, float]:
    """Measure GB/s of a large copy, read and written bytes counted, and TFLOP/s of a product."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    right = torch.randn_like(left)
    product = do_bench(lambda: left @ right, return_mode="median")
    return {"copy_gbs": 2 * len(source) / copy / 1e6, "matmul_tflops": 2 * 8192**3 / product / 1e9}
