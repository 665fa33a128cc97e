"""Choose whether a DeepSeek layer attends over latents or over per-head keys and values."""

from __future__ import annotations

from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
    AttnForwardMethod,
)
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

_LIKE = "fa3"  # its prefill over per-head keys runs short prompts in one call, long ones in chunks
_CODED: set[str] = set()  # backend names of models with FP8 caches
_JOINED: set[str] = set()  # backend names of models that need queries and keys joined


def teach(name: str, *, is_fp8: bool, takes_parts: bool) -> None:
    """Register how SGLang's DeepSeek layers call the backend `name`.

    SGLang stores these properties by the name of the backend, and a target model and its draft
    model have the same name. A property that one of the models needs therefore holds for both.

    Parameters
    ----------
    name : str
    is_fp8 : bool
        Whether the cache contains FP8 codes. SGLang's own cache writer, which runs with attention
        over per-head keys, does not apply a scale. Layers whose scale is not 1 therefore attend
        over latents.
    takes_parts : bool
        Whether layers pass queries and keys in two parts, latent and rotated, instead of in one
        tensor that needs a copy.
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
