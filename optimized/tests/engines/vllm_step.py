"""Small steps as vLLM describes them to a builder, and what builders read of its config."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from mla_step import P, R
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from paged_mla_optimized.engines.vllm.backend import PagedMlaBackend


def engine_config(step, **changes):
    """Return what builders read of vLLM's config: a tiny model, in float32."""
    parts = {
        "model_config": SimpleNamespace(
            dtype=torch.float32,
            max_model_len=step.config.max_model_len,
            get_num_attention_heads=lambda _: step.config.num_heads,
            get_head_size=lambda: 576,  # what vLLM allows; the cache is the tiny model's
            hf_text_config=SimpleNamespace(
                q_lora_rank=None,
                kv_lora_rank=R,
                qk_nope_head_dim=32,
                qk_rope_head_dim=P,
                v_head_dim=32,
            ),
        ),
        "parallel_config": SimpleNamespace(
            cp_kv_cache_interleave_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            use_ubatching=False,
        ),
        "compilation_config": SimpleNamespace(
            static_forward_context={}, max_cudagraph_capture_size=16
        ),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        "cache_config": SimpleNamespace(block_size=step.config.block_size, cache_dtype="auto"),
        "attention_config": SimpleNamespace(use_prefill_query_quantization=False),
        "speculative_config": None,
        "additional_config": {},
        "use_v2_model_runner": False,
    }
    return SimpleNamespace(**(parts | changes))


def engine_layer(step, **changes):
    """Return what builders and layers read of a layer."""
    parts = {
        "scale": step.config.softmax_scale,
        "kv_cache_dtype": "auto",
        "_k_scale": torch.tensor(7.0),  # has no meaning where the cache is not FP8
        "prefill_backend": SimpleNamespace(clone=lambda: None),
        "q_lora_rank": None,
        "kv_lora_rank": R,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": P,
        "v_head_dim": 32,
        "num_heads": step.config.num_heads,
    }
    return SimpleNamespace(**(parts | changes))


def builder_maker(monkeypatch):
    """Return a function that makes vLLM's builder, ours beneath, for layers of one group."""
    monkeypatch.setattr(mla_attention, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    if hasattr(mla_attention, "get_num_attention_heads_from_layers"):
        monkeypatch.setattr(mla_attention, "get_num_attention_heads_from_layers", lambda *_: None)

    def builder(step, config, *layers):
        names = [str(i) for i in range(len(layers))]
        config.compilation_config.static_forward_context.update(zip(names, layers, strict=True))
        spec = SimpleNamespace(block_size=step.config.block_size)
        return PagedMlaBackend.get_builder_cls()(spec, names, config, torch.device("cpu"))

    return builder


def common(step, max_query_len):
    """Return the engine's own description of a step."""
    table = step.block_table.clone()
    table[table == 2**31 - 1] = 0  # vLLM's fill
    return CommonAttentionMetadata(
        query_start_loc=step.cu_seqlens_q,
        query_start_loc_cpu=step.cu_seqlens_q,
        seq_lens=step.seq_lens,
        num_reqs=len(step.rows),
        num_actual_tokens=len(step.q_nope),
        max_query_len=max_query_len,
        max_seq_len=step.config.max_model_len,
        block_table_tensor=table,
        slot_mapping=torch.full((len(step.q_nope),), -1),
    )
