"""Which way a DeepSeek layer goes: over latents, or over keys and values of heads."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

_LIKE = "fa3"  # prompts over heads: in one call where they are short, else chunk by chunk


def teach(name: str, *, is_fp8: bool, takes_parts: bool) -> None:
    """Tell SGLang's DeepSeek layers what the backend `name` takes.

    Parameters
    ----------
    name : str
    is_fp8 : bool
        The cache holds codes. SGLang's own writer, in the way over heads, knows no scale: layers
        that have one go over latents.
    takes_parts : bool
        Queries and keys come in two parts, latent and rotated, instead of one that is joined by a
        copy.
    """
    others = AttentionBackendRegistry.get_handler(_LIKE)

    def handle(attn: Any, forward_batch: Any) -> AttnForwardMethod:
        if is_fp8 and attn.attn_mqa.k_scale_float not in {None, 1.0}:
            return AttnForwardMethod.MLA
        return others(attn, forward_batch)

    AttentionBackendRegistry.register(name, handle)
    if takes_parts and name not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
