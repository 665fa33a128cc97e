"""DeepSeek models of the transformers library with random weights, small or of real head sizes."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from paged_mla_optimized.engines.transformers import LatentPool

VOCAB, PAD = 61, 0
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


@dataclass(frozen=True)
class Size:
    """R, P, N and V, the width of the model, and the device that it fits."""

    latent: int
    rope: int
    nope: int
    value: int
    hidden: int
    device: str
    dtype: torch.dtype
    """The 16-bit one that the device's kernels run in."""
    scale: int
    """The factor by which prompts are longer than the shortest useful prompts."""


TINY = Size(32, 16, 16, 16, 48, "cpu", torch.float16, 1)
REAL = Size(512, 64, 128, 128, 576, "cuda", torch.bfloat16, 16)


@dataclass(frozen=True)
class Kind:
    """What one model differs in from another."""

    family: str  # "v2", "v3" or "v3_neox"
    heads: int = 4
    yarn: bool = False
    q_lora: bool = False
    experts: bool = False
    block_size: int = 16
    half: bool = False
    form: str | None = "absorbed"
    """The form of its rows, a name of ``hf_forms.FORMS``; ``None`` selects the faster form."""
    layers: int = 2


def forward(model, ids, cache, **options):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **options).logits


def build(kind: Kind, size: Size, seed: int = 0):
    """Return a model, in eval mode."""
    longest = 64 * size.scale + 64
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if kind.yarn:
        rope = YARN | {"original_max_position_embeddings": int(longest / YARN["factor"])}
    common = {
        "vocab_size": VOCAB,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "moe_intermediate_size": size.hidden,
        "num_hidden_layers": kind.layers,
        "num_attention_heads": kind.heads,
        "num_key_value_heads": kind.heads,
        "kv_lora_rank": size.latent,
        "q_lora_rank": 3 * size.hidden // 4 if kind.q_lora else None,
        "qk_rope_head_dim": size.rope,
        "qk_nope_head_dim": size.nope,
        "v_head_dim": size.value,
        "first_k_dense_replace": kind.layers - kind.experts,
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,  # all of them: a choice would make logits jump
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": longest,
        "rope_parameters": rope,
        "initializer_range": size.hidden**-0.5,  # logits and scores of order 1
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    if kind.family == "v2":
        model = DeepseekV2ForCausalLM(DeepseekV2Config(**common))
    else:
        interleaved = kind.family == "v3"
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**common, rope_interleave=interleaved))
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # which also runs in float64
    dtype = size.dtype if kind.half else torch.float32
    return model.to(dtype).to(size.device).eval()


def paged(model, block_size: int, num_blocks: int = 64, **capacities):
    """Return a model of the same weights that reads a pool, and the pool, full of NaN."""
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("paged_mla")
    longest = ours.config.max_position_embeddings
    capacities = {"max_rows": 8, "max_step_tokens": 4 * longest, **capacities}
    pool = LatentPool(ours, num_blocks, block_size=block_size, **capacities)
    pool.latents.fill_(torch.nan)
    return ours, pool
