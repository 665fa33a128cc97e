"""What FP8 caches give back: each code times its scale."""

import pytest
import torch
from fp8_step import NAMES, build_fp8
from mla_step import P, R

from paged_mla_optimized import PagedMla
from paged_mla_optimized.tensors.step import MlaStep


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_are_what_the_cache_holds(name, dtype):
    """S-9, S-11: bit for bit, of every format, and nothing past the last key."""
    step = build_fp8(name, (33, 1), (0, 0), (5, 5), (70, 2), dtype=dtype)
    mla = PagedMla(step.config, "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=8))
    ckv, k_pe = torch.full((120, R), 7.0, dtype=dtype), torch.full((120, P), 7.0, dtype=dtype)
    mla.gather_context(step.cache, ckv, k_pe)
    keys = torch.cat(step.keys).float().to(dtype)
    assert torch.equal(ckv[:108], keys[:, :R])
    assert torch.equal(k_pe[:108], keys[:, R:])
    assert (ckv[108:] == 7).all()
    assert (k_pe[108:] == 7).all()
