"""Tests of the example adapter on the page about new backends, with both of its kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "your-backend.md"
KERNELS = """
import torch


def decode(q_nope, q_pe, ckv_cache, kpe_cache, pages, scale, out, lse):
    size = ckv_cache.shape[1]
    for b, last in enumerate(pages.last_page_len.tolist()):
        listed = pages.indices[pages.indptr[b] : pages.indptr[b + 1]].long()
        keys = max(len(listed) - 1, 0) * size + last
        ckv, kpe = (cache[listed].flatten(0, 1)[:keys] for cache in (ckv_cache, kpe_cache))
        scores = scale * (q_nope[b] @ ckv.T + q_pe[b] @ kpe.T)
        lse[b] = torch.logsumexp(scores, -1)
        out[b] = torch.softmax(scores, -1) @ ckv if keys else 0


def write(ckv, k_pe, ckv_cache, kpe_cache, slots):
    kept = slots >= FIRST
    for cache, tokens in ((ckv_cache, ckv), (kpe_cache, k_pe)):
        cache.flatten(0, 1)[slots[kept]] = tokens[kept]
"""


def example() -> str:
    """Return the page's adapter."""
    [source] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return source


def test_it_is_short():
    """The adapter has at most 20 lines."""
    assert len(example().splitlines()) <= 20


@pytest.mark.parametrize(
    ("first", "status", "said"), [("0", 0, "PASSED in part"), ("-1", 1, "S-10")]
)
def test_the_suite_tests_both_kernels(first: str, status: int, said: str, tmp_path: Path):
    """Right kernels pass, and a writer that uses slot -1 fails with its rule."""
    (tmp_path / "my_adapter.py").write_text(example())
    (tmp_path / "my_kernels.py").write_text(KERNELS.replace("FIRST", first))
    given = ("--backend", "my_adapter:create", "--profile", "kernel", "--quick")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.getenv("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "paged_mla", "conformance", *given],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-2000:]
    assert said in done.stdout
