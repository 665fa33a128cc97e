"""Known signatures of other projects' kernels, with their conventions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from paged_mla_adapters import flashinfer, flashmla, flashmla_fp8, sglang_triton, vllm_triton
from paged_mla_adapters.judge import aiter_decode, fa3, lightllm_decode
from paged_mla_adapters.judge.claims import DTYPES, Served
from paged_mla_adapters.kernel import Kernel


@dataclass(frozen=True)
class Like:
    """A known signature.

    Parameters
    ----------
    bind : callable or None
        Takes a function or a class with this signature and returns its :data:`Kernel`. With
        ``None`` the names of the parameters determine the call.
    of : str
        The function with this signature, ``module:function``.
    profile : str
        The profiles of the suite for this signature, separated by commas.
    roles : frozenset of str
        The roles of its parameters that decide which calls are probed.
    dtypes : tuple of str
        The data types to probe. Some functions accept further types without an error.
    served : Served
        Known values, which are not probed.
    """

    bind: Callable[[Callable[..., Any]], Kernel] | None
    of: str
    profile: str
    roles: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = DTYPES
    served: Served = field(default_factory=Served)

    @property
    def has_lse(self) -> bool:
        """Whether the function returns an lse."""
        return "no-lse" not in self.profile.split(",")


def _flash_mla(function: Callable[..., Any]) -> Kernel:
    return partial(flashmla.by_tokens, flashmla.by_rows(function))


def _flash_mla_fp8(function: Callable[..., Any]) -> Kernel:
    metadata = sys.modules[function.__module__].get_mla_metadata_dense_fp8
    return partial(flashmla_fp8.attend, metadata, function)


def _flashinfer(backend: str) -> Callable[[Callable[..., Any]], Kernel]:
    def bind(wrapper: Callable[..., Any]) -> Kernel:
        return partial(flashinfer.attend, sys.modules[wrapper.__module__], backend)

    return bind


def _by(attend: Callable[..., Any]) -> Callable[[Callable[..., Any]], Kernel]:
    """Return a function that binds the first argument of `attend`, the judged function."""
    return lambda function: partial(attend, function)


_ROWS = frozenset({"causal", "max_query_len"})
_RAGGED = frozenset({"causal", "cu_seqlens_q"})
_SCALED = frozenset({"k_scale"})
_FLASHMLA_FP8 = Served(
    dtypes=("bfloat16",),
    cache_formats=("fp8_e4m3",),
    masks=("causal", "non_causal"),
    num_heads=tuple(range(1, 129)),
    block_sizes=(64,),
    head_dims=((512, 64),),
    max_query_len=128,
    products="fast",
)
_WRAPPER = "flashinfer.mla:BatchMLAPagedAttentionWrapper"
LIKE = {
    "flash_mla": Like(_flash_mla, "flash_mla:flash_mla_with_kvcache", "flashmla,kernel", _ROWS),
    "flash_mla-fp8": Like(
        _flash_mla_fp8,
        "vllm.v1.attention.ops.flashmla:flash_mla_with_kvcache_fp8",
        "flashmla,kernel",
        served=_FLASHMLA_FP8,
    ),
    "fa3": Like(fa3.bind, "vllm.vllm_flash_attn:flash_attn_varlen_func", "kernel", _RAGGED),
    "flashinfer-fa2": Like(_flashinfer("fa2"), _WRAPPER, "base-2,kernel", _RAGGED),
    "flashinfer-fa3": Like(_flashinfer("fa3"), _WRAPPER, "base-2,kernel", _RAGGED),
    "flashinfer-bench": Like(
        None, "`run` of a definition mla_paged_*", "base-2,kernel", dtypes=("bfloat16",)
    ),
    "vllm-triton": Like(
        _by(vllm_triton.attend),
        f"{vllm_triton.MODULE}:decode_attention_fwd",
        "vllm,kernel",
        _SCALED,
    ),
    "sglang-triton": Like(
        sglang_triton.SglangDecode,
        f"{sglang_triton.MODULES[0]}:decode_attention_fwd",
        "sglang,kernel",
        _SCALED,
        served=Served(products="fast"),
    ),
    "lightllm": Like(
        _by(lightllm_decode.attend),
        "lightllm.models.deepseek2.triton_kernel.gqa_flash_decoding:"
        "gqa_token_decode_attention_flash_decoding",
        "kernel,no-lse",
    ),
    "aiter": Like(_by(aiter_decode.attend), "aiter.mla:mla_decode_fwd", "kernel", _ROWS | _SCALED),
}
"""The known signatures, by their names in the option ``--like``."""
