"""A DeepSeek-V3 with random weights, full attention widths, few layers and no experts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

VOCAB = 2048
HIDDEN, Q_LORA, KV_LORA, NOPE, ROPE, VALUE, INTER = 1024, 512, 512, 128, 64, 128, 2048
LOGIT_GAIN = 4.0  # logits of a few units: some steps have a clear winner, others nearly tie
QUERY_GAIN, OUTPUT_GAIN = 1.5, 3.0  # attention is selective and affects the logits


def build_model(
    folder: Path, *, heads: int, layers: int, mtp: bool = False, family: str = "v3"
) -> Path:
    """Write config.json and the weights if they do not exist; return their folder.

    Every tensor that attention reads has the scale of a tensor in a trained model.

    Parameters
    ----------
    folder : Path
        The folder that contains the models.
    heads, layers : int
    mtp : bool
        Whether to add a layer with random weights that drafts the next token.
    family : str
        The model type in the config: "v3" or "v2". Without experts both are the same model.
    """
    home = folder.absolute() / f"{family}-h{heads}-l{layers}{'-mtp' if mtp else ''}"
    if (home / "config.json").exists():
        return home
    from safetensors.torch import save_file  # comes with engines

    home.mkdir(parents=True, exist_ok=True)
    save_file(_weights(heads, layers, mtp=mtp), home / "model.safetensors", {"format": "pt"})
    (home / "config.json").write_text(json.dumps(_config(family, heads, layers, mtp=mtp)))
    return home


def build_models(
    folder: Path, *, heads: int, layers: int, mtp: bool = False, drafts: bool = False
) -> tuple[Path, Path]:
    """Write a model and its draft model; return both folders.

    The draft model is the same model. With `drafts` it is written again as a DeepSeek-V2, because
    engines use only the MTP layers of a DeepSeek-V3 that is a draft model.
    """
    model = build_model(folder, heads=heads, layers=layers, mtp=mtp)
    if not drafts:
        return model, model
    return model, build_model(folder, heads=heads, layers=layers, family="v2")


def _config(family: str, heads: int, layers: int, *, mtp: bool) -> dict[str, object]:
    return {
        "architectures": [f"Deepseek{family.upper()}ForCausalLM"],
        "model_type": f"deepseek_{family}",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "moe_intermediate_size": 256,
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers + 1,  # no layer has experts
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": int(mtp),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _weights(heads: int, layers: int, *, mtp: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn * (gain / math.sqrt(columns))).bfloat16()

    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    found = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, math.sqrt(HIDDEN)),
        "lm_head.weight": matrix(VOCAB, HIDDEN, LOGIT_GAIN),
        "model.norm.weight": ones(HIDDEN),
    }
    for layer in range(layers + mtp):
        home = f"model.layers.{layer}"
        attention, mlp = f"{home}.self_attn", f"{home}.mlp"
        found |= {
            f"{home}.input_layernorm.weight": ones(HIDDEN),
            f"{home}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{attention}.q_a_proj.weight": matrix(Q_LORA, HIDDEN),
            f"{attention}.q_a_layernorm.weight": ones(Q_LORA),
            f"{attention}.q_b_proj.weight": matrix(heads * (NOPE + ROPE), Q_LORA, QUERY_GAIN),
            f"{attention}.kv_a_proj_with_mqa.weight": matrix(KV_LORA + ROPE, HIDDEN),
            f"{attention}.kv_a_layernorm.weight": ones(KV_LORA),
            f"{attention}.kv_b_proj.weight": matrix(heads * (NOPE + VALUE), KV_LORA),
            f"{attention}.o_proj.weight": matrix(HIDDEN, heads * VALUE, OUTPUT_GAIN),
            f"{mlp}.gate_proj.weight": matrix(INTER, HIDDEN),
            f"{mlp}.up_proj.weight": matrix(INTER, HIDDEN),
            f"{mlp}.down_proj.weight": matrix(HIDDEN, INTER),
        }
    if mtp:
        home = f"model.layers.{layers}"
        found |= {
            f"{home}.embed_tokens.weight": found["model.embed_tokens.weight"].clone(),
            f"{home}.enorm.weight": ones(HIDDEN),
            f"{home}.hnorm.weight": ones(HIDDEN),
            f"{home}.eh_proj.weight": matrix(HIDDEN, 2 * HIDDEN),
            f"{home}.shared_head.norm.weight": ones(HIDDEN),
            f"{home}.shared_head.head.weight": found["lm_head.weight"].clone(),
        }
    return found
