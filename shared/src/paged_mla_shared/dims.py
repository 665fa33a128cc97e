"""Head dimensions of MLA models; the names are those of the models' ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MlaDims:
    """Sizes of one MLA attention layer on one rank.

    Parameters
    ----------
    num_heads : int
        H, the query heads on this rank, 1..128 in current models.
    kv_lora_rank : int
        R, the width of the cached latent, and of keys and values in absorbed attention.
    qk_rope_head_dim : int
        P, the width of the rotated key that all heads share; even.
    qk_nope_head_dim, v_head_dim : int
        N and V, the widths of keys without position and of values in materialized attention.

    Notes
    -----
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1, and the published configs. For Mistral
    Small 4 and GLM-4.7-Flash: ``Mistral4Config`` and ``Glm4MoeLiteConfig`` in transformers.
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int

    def with_heads(self, num_heads: int) -> MlaDims:
        """Return the dims of the same layer with `num_heads` heads (tensor parallelism)."""
        return replace(self, num_heads=num_heads)

    @property
    def softmax_scale(self) -> float:
        """The softmax scale without a model's YaRN factor, ``(N + P) ** -0.5`` (S-5)."""
        scale: float = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return scale

    @property
    def cached_dim(self) -> int:
        """The number of elements of one cached token, R + P."""
        return self.kv_lora_rank + self.qk_rope_head_dim


DEEPSEEK_V3 = MlaDims(128, 512, 64, 128, 128)
DEEPSEEK_V2 = DEEPSEEK_V3
DEEPSEEK_V2_LITE = DEEPSEEK_V3.with_heads(16)
MISTRAL_SMALL_4 = MlaDims(32, 256, 64, 64, 128)
GLM_4_7_FLASH = MlaDims(20, 512, 64, 192, 256)
SMALL = MlaDims(4, 32, 16, 16, 16)

PRESETS = {
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "mistral-small-4": MISTRAL_SMALL_4,
    "glm-4.7-flash": GLM_4_7_FLASH,
    "small": SMALL,
}
