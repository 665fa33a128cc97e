"""A step behind vLLM's conventions is dumped by the page's recipe, and its fault is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mla_step import config

from paged_mla_optimized.engines.vllm.decode import Decode

explanation = pytest.importorskip(
    "paged_mla_reference.debug.explanation", reason="nox -s engines has it"
)
from paged_mla_shared.dump import load_dump  # noqa: E402 - after the reason to skip

PAGE = Path(__file__).parents[2] / "docs" / "dumps.md"
RANK, ROPE, HEADS, BLOCK, SCALE = 512, 64, 4, 64, 192**-0.5
LENGTHS, TABLE = (70, 33, 129), ((4, 1, 0), (6, 0, 0), (2, 5, 3))

Lengths = Callable[[torch.Tensor, int], torch.Tensor]


def recipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return the page's lines for ``forward_mqa`` as a function of what is there."""
    text = PAGE.read_text()
    [keep] = [
        code for code in re.findall(r"```python\n(.+?)```", text, re.DOTALL) if "def keep" in code
    ]
    [lines] = re.findall(r"\*\*vLLM\*\*.+?```python\n(.+?)```", text, re.DOTALL)
    monkeypatch.chdir(path)

    def run(**given: Any) -> None:
        names: dict[str, Any] = {}
        exec(keep, names)
        exec(lines, names | given)

    return run


def forward(lengths: Lengths, query_len: int, keep: Callable[..., None]) -> None:
    """Plan a step as the metadata builder does, attend as the layer does, and dump it.

    The interpreter does not know bfloat16: its numbers are computed with in float32.
    """
    generator = torch.Generator().manual_seed(0)
    rows = len(LENGTHS)
    cache = torch.randn(8, BLOCK, RANK + ROPE, generator=generator).bfloat16()
    q = torch.randn(rows * query_len, HEADS, RANK + ROPE, generator=generator).bfloat16()
    seq_lens = torch.tensor(LENGTHS, dtype=torch.int32)
    table = torch.tensor(TABLE, dtype=torch.int32)
    of_model = config(
        num_heads=HEADS,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        block_size=BLOCK,
        softmax_scale=SCALE,
    )
    planned = Decode(of_model, "cpu", (1, query_len)).plan(
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * query_len,
        seq_lens=lengths(seq_lens, query_len),
        block_table=table,
        num_tokens=len(q),
    )
    out, lse = planned.attend(q.float(), cache.float(), torch.tensor(1.0))
    keep(
        self=SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROPE, scale=SCALE),
        attn_metadata=SimpleNamespace(
            decode=SimpleNamespace(block_table=table, seq_lens=seq_lens)
        ),
        layer=SimpleNamespace(layer_name="layers.0"),
        q=q, kv_c_and_k_pe_cache=cache, o=out.bfloat16(), lse=lse,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lengths", "query_len", "name"),
    [
        (lambda lens, _: lens, 1, ""),
        (lambda lens, _: lens, 3, ""),
        (
            lambda lens, query_len: lens - query_len,
            3,
            "the rows' lengths leave out the step's tokens",
        ),
        (
            lambda lens, query_len: lens + query_len,
            3,
            "the rows' lengths count the step's tokens twice",
        ),
    ],
    ids=["right", "right-drafts", "left-out", "twice"],
)
def test_lengths_of_another_convention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: Lengths, query_len: int, name: str
):
    """S-2: ``seq_lens`` counts this step's tokens once; an adapter that does not is found out."""
    forward(lengths, query_len, recipe(tmp_path, monkeypatch))
    found = explanation.explain(load_dump(tmp_path / "vllm-layers.0.safetensors"))
    assert found.is_broken == bool(name), found.verdict
    assert [fit.hypothesis.name for fit in found.best[:1]] == [name] * bool(name), found.cause
