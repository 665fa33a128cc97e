"""Record what the classes of ``engines/vllm`` meet of a release of vLLM, from its sources.

    pip download vllm==0.33.0 --no-deps && unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d SITE
    python optimized/tests/engines/record_vllm.py SITE 0.33.0

writes ``vllm_surfaces/0.33.0.json`` next to this file. It neither imports nor runs vLLM.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from recording import parse, record, write

SURFACES = Path(__file__).parent / "vllm_surfaces"

CLASSES = {
    "vllm.forward_context": ("ForwardContext",),
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionCGSupport",
        "AttentionImplBase",
        "AttentionMetadataBuilder",
        "MLAAttentionImpl",
        "MultipleOf",
    ),
    "vllm.model_executor.layers.attention.mla_attention": (
        "MLAAttention",
        "MLACommonBackend",
        "MLACommonBaseImpl",
        "MLACommonDecodeMetadata",
        "MLACommonImpl",
        "MLACommonMetadata",
        "MLACommonMetadataBuilder",
        "MLACommonPrefillMetadata",
        "MLADims",
        "QueryLenSupport",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum",),
    "vllm.v1.attention.backends.mla.prefill.base": ("MLADimensions", "MLAPrefillBackend"),
    "vllm.v1.attention.backends.mla.prefill.registry": ("MLAPrefillBackendEnum",),
}
"""Classes that ours extend or read, by module."""

CALLERS = (
    "vllm.v1.attention.backend",
    "vllm.model_executor.layers.attention.mla_attention",
    "vllm.v1.worker.utils",
)
"""Modules that call ours."""

CALLED = frozenset(
    {
        "_build_decode",
        "_concat_k_nope_k_pe",
        "builder_cls",
        "forward_mha",
        "forward_mqa",
        "get_forward_context",
        "get_kv_cache_stride_order",
        "get_supported_head_sizes",
        "get_supported_kernel_block_sizes",
        "impl_cls",
        "is_forward_context_available",
        "prefill_backend_cls",
        "prepare_metadata",
        "register_backend",
        "register_mla_prefill_backend",
        "run_prefill_context_chunk",
        "run_prefill_new_tokens",
        "supports_batch_invariance",
        "supports_combination",
        "supports_compute_capability",
    }
)
"""Methods of ours, and functions that we call, whose arguments matter."""

VARIABLES = frozenset({"VLLM_BATCH_INVARIANT"})
"""What ours read of the environment, through ``vllm.envs``."""


def record_vllm(site: Path, version: str) -> dict[str, Any]:
    """Return the surface of the vLLM in a folder."""
    found = record(site, version, classes=CLASSES, callers=CALLERS, called=CALLED)
    declared = {
        node.target.id
        for node in ast.walk(parse(site, "vllm.envs"))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    found["names"] = {"vllm.envs": ", ".join(sorted(VARIABLES & declared))}
    return found


if __name__ == "__main__":
    write(SURFACES, record_vllm)
