"""The example of the backend's README runs, but for the device and dtype; engines' names are right.

That of transformers runs in ``tests_engines``.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from test_hf_config import V3

from paged_mla_optimized.engines.sglang import registration as sglang
from paged_mla_optimized.engines.vllm import registration as vllm

FOLDER = Path(__file__).parents[1]


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.+?)```", page.read_text(), re.DOTALL)


def test_engines_are_given_the_names_that_are_registered():
    in_vllm, in_sglang, _ = examples(FOLDER / "docs" / "engines.md")
    assert f'attention_backend="{vllm.OWN_NAME}"' in in_vllm
    assert f'attention_backend="{sglang.NAME}"' in in_sglang
    for example in (in_vllm, in_sglang):
        compile(example, "engines.md", "exec")


def test_the_example_runs():
    """One prompt of 20 tokens and one decode row of 70, at DeepSeek-V3 widths."""
    example = examples(FOLDER / "README.md")[0]
    example = example.replace('device="cuda"', 'device="cpu"')  # the interpreter
    example = example.replace("block_size=64,", "block_size=64, dtype=torch.float32,")
    example = example.replace("mla.new_cache(num_blocks)", "ones_of(mla.new_cache(4))")
    example = example.replace("max_model_len=131072,", "max_model_len=1024,")
    tokens, heads = 21, 16
    names = {
        "cu_seqlens_q": torch.tensor([0, 20, 21], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 70], dtype=torch.int32),
        "block_table": torch.tensor([[2, -1], [0, 3]], dtype=torch.int32),
        "ckv": torch.ones(tokens, 512),
        "k_pe": torch.ones(tokens, 64),
        "hf_config": V3,
        "torch": torch,
        "ones_of": lambda cache: cache._replace(latents=torch.ones_like(cache.latents)),
        "q_nope": torch.randn(tokens, heads, 512),
        "q_pe": torch.randn(tokens, heads, 64),
    }
    exec(example, names)
    assert names["cache"].latents.shape == (4, 64, 576)
    torch.testing.assert_close(names["out"], torch.ones(tokens, heads, 512))
    assert names["lse"].shape == (tokens, heads)
