"""As much of SGLang as the backend class imports, and runners and batches as SGLang makes them.

What of it is true is held against SGLang's own sources by ``test_sglang_surface.py``, and inside it
by ``test_sglang_installed.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from mla_step import P, R, Step
from sglang_step import CONTEXTS, Held, context

_ROOM = "paged_mla_optimized.engines.sglang"
_BACKEND, _DISPATCH = f"{_ROOM}.backend", f"{_ROOM}.dispatch"
_DEEPSEEK = "models.deepseek_common"


class RadixAttention(torch.nn.Module):
    """A layer over latents."""

    def __init__(self, num_heads: int, scaling: float, k_scale: float | None) -> None:
        super().__init__()
        self.tp_q_head_num, self.scaling = num_heads, scaling
        self.qk_head_dim, self.v_head_dim = R + P, R
        self.logit_cap, self.sliding_window_size = 0, -1
        self.attn_type = SimpleNamespace(value="decoder")
        self.layer_id, self.k_scale, self.k_scale_float = 0, None, k_scale


class AttentionBackend:
    """What SGLang's classes extend."""


class AttentionBackendRegistry:
    """Which way a layer goes, by the name of its backend; "fa3" sends all prompts over heads."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {"fa3": lambda _attn, _batch: "MHA"}
        self.register = self.handlers.__setitem__
        self.get_handler = self.handlers.__getitem__


class Mode:
    """A forward mode: "decode", "verify", "extend" or "draft-extend"."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_draft_extend_v2(self) -> bool:
        return self.name == "draft-extend"

    def is_idle(self) -> bool:
        return self.name == "idle"


@contextmanager
def stubbed_dispatch() -> Iterator[Any]:
    """Yield the dispatch module, imported with the stub."""
    with stubbed():
        yield import_module(_DISPATCH)


@contextmanager
def stubbed(*, two_batch_overlap: bool = False, **changes: Any) -> Iterator[Any]:
    """Yield the module of our backend class, made on the stub; `changes` are of its context."""
    of_all = context(**changes)
    attributes: dict[str, dict[str, Any]] = {
        "configs.hybrid_arch": {
            "mambaish_config": lambda model: getattr(model, "linear_attention", None)
        },
        "layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        "layers.attention.verify_mask": {"VerifyMask": SimpleNamespace},
        "layers.moe.utils": {"is_tbo_enabled": lambda: two_batch_overlap},
        "layers.radix_attention": {"RadixAttention": RadixAttention},
        f"{_DEEPSEEK}.attention_backend_handler": {
            "AttentionBackendRegistry": AttentionBackendRegistry()
        },
        f"{_DEEPSEEK}.attention_forward_methods.forward_methods": {
            "AttnForwardMethod": SimpleNamespace(MLA="MLA")
        },
        f"{_DEEPSEEK}.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["fa3"]},
        "runtime_context": dict.fromkeys(CONTEXTS, lambda: of_all),
        "speculative.eagle_utils": {"TreeMaskMode": SimpleNamespace(QLEN_ONLY=1)},
    }
    modules = {}
    for name, found in attributes.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(found)
        modules[module.__name__] = module
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            package = ".".join(parts[:end])
            modules.setdefault(package, ModuleType(package))
    with _instead(modules):
        backend = import_module(_BACKEND)
        with (
            patch.object(backend, "misfit", lambda **_: None),
            patch.object(torch.cuda, "get_device_capability", lambda: (9, 0)),
        ):
            yield backend


@contextmanager
def _instead(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Make imports find `modules`, and import this package's modules again; others stay."""
    before = {name: sys.modules.pop(name, None) for name in (*modules, _BACKEND, _DISPATCH)}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def runner_of(step: Step, held: Held, *, k_scale: float | None = None, **changes: Any) -> Any:
    """Return a model runner whose pools are those of a step."""
    lines = torch.zeros(9, step.config.max_model_len, dtype=torch.int32)
    lines[: len(held.req_to_token)] = held.req_to_token
    parts = {
        "model": torch.nn.ModuleList([RadixAttention(4, step.config.softmax_scale, k_scale)]),
        "model_config": SimpleNamespace(
            kv_lora_rank=R, qk_rope_head_dim=P, qk_nope_head_dim=64, v_head_dim=64, context_len=128
        ),
        "req_to_token_pool": SimpleNamespace(size=8, req_to_token=lines),
        "token_to_kv_pool": SimpleNamespace(get_key_buffer=lambda _layer: held.pool),
        "token_to_kv_pool_allocator": SimpleNamespace(),
        "spec_algorithm": SimpleNamespace(is_ngram=lambda: False),
        "use_mla_backend": True,
        "is_draft_worker": False,
        "page_size": step.config.block_size,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "device": "cpu",
        "prefill_attention_backend_str": "paged_mla",
        "decode_attention_backend_str": "paged_mla",
    }
    return SimpleNamespace(**(parts | changes))
