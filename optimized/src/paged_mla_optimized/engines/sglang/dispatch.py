"""Which way a DeepSeek layer goes: over latents, or over keys and values of heads."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

_LIKE = "fa3"  # prompts over heads: in one call where they are short, else chunk by chunk
_CODED: set[str] = set()  # names of backends of a model whose cache holds codes
_JOINED: set[str] = set()  # and of one that takes queries and keys joined


def teach(name: str, *, is_fp8: bool, takes_parts: bool) -> None:
    """Tell SGLang's DeepSeek layers what the backend `name` takes.

    SGLang keeps it by name, and a target and its draft have the same: what either needs, both get.

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
    if is_fp8:
        _CODED.add(name)
    if not takes_parts:
        _JOINED.add(name)
    others = AttentionBackendRegistry.get_handler(_LIKE)

    def handle(attn: Any, forward_batch: Any) -> AttnForwardMethod:
        if name in _CODED and attn.attn_mqa.k_scale_float not in {None, 1.0}:
            return AttnForwardMethod.MLA
        return others(attn, forward_batch)

    AttentionBackendRegistry.register(name, handle)
    known = name in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    if name in _JOINED and known:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.remove(name)
    elif name not in _JOINED and not known:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
