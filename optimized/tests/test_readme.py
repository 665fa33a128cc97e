"""The README's example runs as it stands there, but for the device and the dtype."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs():
    """One prompt of 20 tokens and one decode row of 70, at DeepSeek-V3 widths."""
    [example] = re.findall(r"```python\n(.+?)```", README.read_text(), re.DOTALL)
    example = example.replace('device="cuda"', 'device="cpu"')  # the interpreter
    example = example.replace(
        "block_size=64,", 'block_size=64, dtype=torch.float32, cache_format="fp32",'
    )
    tokens, heads = 21, 16
    names = {
        "cu_seqlens_q": torch.tensor([0, 20, 21], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 70], dtype=torch.int32),
        "block_table": torch.tensor([[2, -1], [0, 3]], dtype=torch.int32),
        "ckv": torch.ones(tokens, 512),
        "k_pe": torch.ones(tokens, 64),
        "cache": torch.ones(4, 64, 576),
        "q_nope": torch.randn(tokens, heads, 512),
        "q_pe": torch.randn(tokens, heads, 64),
    }
    exec(example, names)
    torch.testing.assert_close(names["out"], torch.ones(tokens, heads, 512))
    assert names["lse"].shape == (tokens, heads)
