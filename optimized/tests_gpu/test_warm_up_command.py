"""A folder of ``paged-mla warm-up`` serves another process, at another path, without a compiler."""

import json
import subprocess
import sys

import pytest

STEP = """
import json
import torch
import triton
from paged_mla_optimized import MlaConfig, MlaStep, PagedMla

compiled = []
listener = lambda *, src, cache_hit, **_: compiled.extend([] if cache_hit else [src.name])
triton.knobs.compilation.listener = listener
config = MlaConfig(
    num_heads=16, softmax_scale=192**-0.5, block_size=64,
    max_rows=256, max_query_tokens=1024, max_model_len=131072,
)
mla = PagedMla(config)
cache = torch.zeros(40, 64, 576, dtype=torch.bfloat16, device="cuda")
for query_lens in ([1, 1, 1], [5, 5, 5], [1, 512, 1]):
    rows, tokens = len(query_lens), sum(query_lens)
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).int().cuda()
    seq_lens = torch.tensor([700, 512, 30], dtype=torch.int32, device="cuda")
    table = torch.arange(rows * 12, dtype=torch.int32, device="cuda").view(rows, 12)
    mla.plan(
        MlaStep(
            cu_seqlens_q, seq_lens, table, num_tokens=tokens, max_query_len=max(query_lens)
        )
    )
    drawn = torch.randn(tokens, 17, 576, dtype=torch.bfloat16, device="cuda")
    mla.append(drawn[:, 16, :512].contiguous(), drawn[:, 16, 512:].contiguous(), cache)
    q_nope, q_pe = drawn[:, :16, :512].contiguous(), drawn[:, :16, 512:].contiguous()
    out, _ = mla.attend(q_nope, q_pe, cache)
    assert out.isfinite().all()
print(json.dumps(compiled))
"""


def contents(folder):
    """Return every file under a folder, and when it was written."""
    return {
        path.relative_to(folder): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Return a folder that was warmed up at another path, which no longer exists."""
    made, shipped = (tmp_path_factory.mktemp("warm") / name for name in ("made", "shipped"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "paged_mla", "warm-up", "--heads", "16"),
            *("--folder", str(made), "--used-at", str(shipped)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"TRITON_CACHE_DIR={shipped}" in done.stdout
    made.rename(shipped)
    return shipped


def test_the_folder_has_binaries(shipped):
    assert len(list(shipped.rglob("*.cubin"))) > 3


def test_another_process_compiles_nothing_and_writes_nothing(shipped, monkeypatch):
    before = contents(shipped)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(shipped))
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert contents(shipped) == before
