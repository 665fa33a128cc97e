"""What vLLM hands to a backend is dumped, and an error of convention in the backend is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ci.installed import import_or_skip
from mla_step import P, R, build

from paged_mla_optimized.engines.vllm.decode import Step
from paged_mla_optimized.engines.vllm.record import record
from paged_mla_optimized.engines.vllm.tools.planted import HEALTHY, PLANTED
from paged_mla_shared.dump import Dump, load_dump
from paged_mla_shared.errors import Unsupported

CAUSES = {
    "short-lengths": "the rows' lengths leave out the step's tokens",
    "scale-of-the-width": "scale-of-the-absorbed-width",
    "tables-of-other-rows": "every row reads through the table of the row before it",
    "binary-lse": "lse-in-base-2",
}
ROWS = ((37, 3), (64, 1), (6, 3))


class Builder:
    """Describes a step to a `Decode`, as vLLM's builder does to the adapter's."""

    def __init__(self, decode: Any) -> None:
        self.decode = decode

    def build(self, _: int, common_attn_metadata: Any) -> Any:
        common = common_attn_metadata
        rows, tokens = len(common.seq_lens), len(common.slot_mapping)
        table, lens = common.block_table_tensor, common.seq_lens
        step = Step(self.decode, common.query_start_loc, lens, table, tokens)
        return SimpleNamespace(num_decodes=rows, num_decode_tokens=tokens, step=step)


class Base:
    def forward_mqa(self, q: Any, cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        return metadata.step.attend(layer, q, cache, layer._k_scale)


@dataclass
class Impl(Base):
    scale: float
    kv_lora_rank: int = R
    qk_rope_head_dim: int = P
    qk_nope_head_dim: int = 16
    v_head_dim: int = 16
    lse_base_on_e: bool = True


class Backend:
    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @staticmethod
    def get_impl_cls() -> type:
        return Impl


def said(step: Any) -> SimpleNamespace:
    """Return vLLM's words for a step."""
    slots = []
    for row, (seq_len, query_len) in enumerate(step.rows):
        positions = torch.arange(seq_len - query_len, seq_len)
        slots.append(step.block_table[row].long()[positions // 16] * 16 + positions % 16)
    table = step.block_table.clone()
    table[table == 2**31 - 1] = 0  # vLLM's fill
    return SimpleNamespace(
        query_start_loc=step.cu_seqlens_q, seq_lens=step.seq_lens, block_table_tensor=table,
        slot_mapping=torch.cat(slots), dcp_local_seq_lens=None,
    )  # fmt: skip


def run(name: str, folder: Path, num_layers: int = 1, **options: Any) -> Any:
    """Run two steps of an engine with a planted error."""
    step = build(*ROWS)
    step.cache.nan_to_num_(0.5)  # engines keep numbers everywhere
    builder = Builder(PLANTED[name](step.config, "cpu", (1, 3)))
    impl = Impl(step.config.softmax_scale)
    with record(Backend, folder, **options) as samples:
        for _ in range(2):
            metadata = builder.build(0, said(step))
            for number in range(num_layers):
                layer = SimpleNamespace(layer_name=f"layers.{number}", _k_scale=torch.ones(()))
                impl.forward_mqa((step.q_nope, step.q_pe), step.cache, metadata, layer)
    return samples


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_named(name: str, tmp_path: Path):
    """A dump contains the values that vLLM passed, not those that the adapter computed."""
    explanation = import_or_skip("paged_mla_reference.explain.explanation")
    [path] = run(name, tmp_path, every=2).written
    found = explanation.explain(load_dump(path))
    assert found.is_broken == (name != HEALTHY), found.verdict
    assert not found.is_broken or found.best[0].hypothesis.name == CAUSES[name], found.cause


def test_sampled_layers_are_written(tmp_path: Path):
    samples = run(HEALTHY, tmp_path / "made", num_layers=2, layers=(1,))
    assert [path.stem for path in samples.written] == ["000000-001", "000001-001"]
    dump = load_dump(samples.written[1])
    assert dump.origin == "step 1, layers.1"
    assert dump.problem.dims.cached_dim == R + P
    assert set(dump.arrays) == {
        "cu_seqlens_q", "seq_lens", "block_table", "slots", "block_ids", "cache_after",
        "q_nope", "q_pe", "out", "lse",
    }  # fmt: skip


def test_dumps_are_bounded(tmp_path: Path):
    samples = run(HEALTHY, tmp_path, most_bytes=1000)
    assert (samples.written, samples.skipped) == ([], 2)


def test_nothing_stays(tmp_path: Path):
    """After the context the classes are as they were, also where a method is inherited."""
    before = dict(vars(Builder)), dict(vars(Impl)), dict(vars(Base))
    with record(Backend, tmp_path):
        assert "forward_mqa" in vars(Impl)
    assert (dict(vars(Builder)), dict(vars(Impl)), dict(vars(Base))) == before


def answered(lse: torch.Tensor | None, cache: torch.Tensor, folder: Path) -> Dump:
    """Return the dump of a backend of zeros and this lse: 2 rows decode, 2 prefill."""

    class Other(Builder):
        def build(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(num_decodes=2, num_decode_tokens=4)

    class Answer(Impl):
        def forward_mqa(self, *_: Any) -> Any:
            return torch.zeros(2, 2, 4, R, dtype=torch.bfloat16), lse

    class Both:
        get_builder_cls = staticmethod(lambda: Other)
        get_impl_cls = staticmethod(lambda: Answer)

    common = said(build(*[(5, 2)] * 4))
    layer = SimpleNamespace(layer_name="0", _k_scale=torch.tensor(0.5))
    with record(Both, folder) as samples:
        metadata = Other(None).build(0, common_attn_metadata=common)
        joined = torch.zeros(4, 4, R + P, dtype=torch.bfloat16)
        Answer(0.2).forward_mqa(joined, cache, metadata, layer)
    return load_dump(samples.written[0])


def test_outputs_of_other_backends(tmp_path: Path):
    """FlashMLA's lse is [B, H, T / B], Triton's of 16 bits; some have none."""
    cache = torch.zeros(9, 16, R + P, dtype=torch.bfloat16)
    lse = torch.arange(16.0).view(2, 4, 2)
    dump = answered(lse, cache, tmp_path)
    np.testing.assert_array_equal(dump.arrays["lse"][1], lse[0, :, 1])
    assert dump.arrays["out"].shape == (4, 4, R)
    assert dump.arrays["cu_seqlens_q"].tolist() == [0, 2, 4]
    assert [len(dump.arrays[name]) for name in ("seq_lens", "block_table", "slots")] == [2, 2, 4]
    for other in (None, lse.bfloat16()):
        assert "lse" not in answered(other, cache, tmp_path).arrays


def test_an_fp8_cache_has_the_layers_scale(tmp_path: Path):
    dump = answered(None, torch.zeros(9, 16, R + P).to(torch.float8_e4m3fn), tmp_path)
    assert (dump.problem.cache_format, dump.problem.cache_scale) == ("fp8_e4m3", 0.5)


def test_a_rank_is_not_recorded(tmp_path: Path):
    """S-18: it does not have all keys of a row."""
    with record(Backend, tmp_path), pytest.raises(Unsupported, match="context parallelism"):
        Builder(None).build(0, SimpleNamespace(dcp_local_seq_lens=torch.ones(1)))
