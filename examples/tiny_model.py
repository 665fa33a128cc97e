"""A small model with DeepSeek's attention and random weights, for the serving loop."""

import torch
from torch.nn.functional import rms_norm, silu

from paged_mla_optimized import HeadWeights, LayerConfig, MlaConfig, Rope, RopePairing

VOCAB, HIDDEN, LAYERS, NOPE, VALUE = 97, 64, 2, 16, 16
CAPACITIES = {"block_size": 16, "max_rows": 4, "max_query_tokens": 32, "max_model_len": 256}
SIZES = {
    "cuda": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "cpu": {  # small sizes, because the interpreter is slow
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "dtype": torch.float32,
    },
}


def config_of(device: str, **changes) -> LayerConfig:
    """Return the configuration of the model's attention and of the largest step of the loop."""
    sizes = SIZES[device] | changes
    scale = (NOPE + sizes["qk_rope_head_dim"]) ** -0.5
    rope = Rope(RopePairing.INTERLEAVED)
    attention = MlaConfig(num_heads=4, softmax_scale=scale, rope=rope, **CAPACITIES, **sizes)
    return LayerConfig(attention=attention, qk_nope_head_dim=NOPE, v_head_dim=VALUE)


class Model:
    """A model from token ids to the most likely next tokens; the caller passes `attend`."""

    def __init__(self, layer_config: LayerConfig, device: str) -> None:
        self.config, config = layer_config, layer_config.attention
        heads, latent, rope = config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim
        shapes = {
            "q": (heads * (NOPE + rope), HIDDEN),
            "kv_a": (latent + rope, HIDDEN),
            "kv_b": (heads * (NOPE + VALUE), latent),
            "o": (HIDDEN, heads * VALUE),
            "up": (4 * HIDDEN, HIDDEN),
            "down": (HIDDEN, 4 * HIDDEN),
        }
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            weight = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return weight.to(device, config.dtype)

        self.embedding = random(VOCAB, HIDDEN)
        self.layers = [
            {name: random(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)
        ]
        self.heads = [HeadWeights.of_kv_b_proj(w["kv_b"], heads, NOPE) for w in self.layers]

    def __call__(self, ids, attend):
        """Return the predicted next token for each token, [T]."""
        config = self.config.attention
        heads, rope = config.num_heads, config.qk_rope_head_dim
        x = self.embedding[ids]
        for layer, w in enumerate(self.layers):
            h = rms_norm(x, x.shape[-1:])
            q_nope, q_pe = (h @ w["q"].T).view(-1, heads, NOPE + rope).split([NOPE, rope], -1)
            ckv, k_pe = (h @ w["kv_a"].T).split([config.kv_lora_rank, rope], -1)
            values = attend(layer, q_nope, q_pe, rms_norm(ckv, ckv.shape[-1:]), k_pe)
            x = x + values.flatten(1) @ w["o"].T
            x = x + silu(rms_norm(x, x.shape[-1:]) @ w["up"].T) @ w["down"].T
        return (rms_norm(x, x.shape[-1:]) @ self.embedding.T).argmax(-1)
