"""Signatures that are known as a whole, with their conventions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from paged_mla_adapters import flashinfer, flashmla, sglang_triton, vllm_triton
from paged_mla_adapters.kernel import Kernel


@dataclass(frozen=True)
class Like:
    """A signature.

    Parameters
    ----------
    bind : callable
        Returns the kernel of a function, or of a class, that has the signature.
    of : str
        The function that has it, ``module:function``.
    profile : str
        The terms in which it is judged.
    roles : frozenset of str
        Roles that its parameters play, of those that decide which calls are probed.
    """

    bind: Callable[[Callable[..., Any]], Kernel]
    of: str
    profile: str
    roles: frozenset[str] = frozenset()


def _flash_mla(function: Callable[..., Any]) -> Kernel:
    return partial(flashmla.by_tokens, flashmla.by_rows(function))


def _flashinfer(backend: str) -> Callable[[Callable[..., Any]], Kernel]:
    def bind(wrapper: Callable[..., Any]) -> Kernel:
        return partial(flashinfer.attend, sys.modules[wrapper.__module__], backend)

    return bind


def _vllm(function: Callable[..., Any]) -> Kernel:
    return partial(vllm_triton.attend, function)


_ROWS = frozenset({"causal", "max_query_len"})
_RAGGED = frozenset({"causal", "cu_seqlens_q"})
_WRAPPER = "flashinfer.mla:BatchMLAPagedAttentionWrapper"
LIKE = {
    "flash_mla": Like(_flash_mla, "flash_mla:flash_mla_with_kvcache", "flashmla,kernel", _ROWS),
    "flashinfer-fa2": Like(_flashinfer("fa2"), _WRAPPER, "base-2,kernel", _RAGGED),
    "flashinfer-fa3": Like(_flashinfer("fa3"), _WRAPPER, "base-2,kernel", _RAGGED),
    "vllm-triton": Like(
        _vllm, f"{vllm_triton.MODULE}:decode_attention_fwd", "vllm,kernel", frozenset({"k_scale"})
    ),
    "sglang-triton": Like(
        sglang_triton.SglangDecode,
        f"{sglang_triton.MODULES[0]}:decode_attention_fwd",
        "sglang,kernel",
        frozenset({"k_scale"}),
    ),
}
"""Signatures by the name that ``--like`` takes."""
