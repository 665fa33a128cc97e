"""Record what the classes of ``engines/sglang`` meet of a release of SGLang, from its sources.

    pip download sglang==0.5.23 --no-deps && unzip -q sglang-0.5.23-*.whl 'sglang/*.py' -d SITE
    python optimized/tests/engines/record_sglang.py SITE 0.5.23

writes ``sglang_surfaces/0.5.23.json`` next to this file. It neither imports nor runs SGLang.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recording import assigned, parse, record, write

SURFACES = Path(__file__).parent / "sglang_surfaces"

_ATTENTION = "sglang.srt.layers.attention"
_DEEPSEEK = "sglang.srt.models.deepseek_common"
_RUNNERS = "sglang.srt.model_executor.runner"

CLASSES = {
    f"{_ATTENTION}.base_attn_backend": ("AttentionBackend",),
    f"{_ATTENTION}.verify_mask": ("VerifyMask",),
    f"{_DEEPSEEK}.attention_backend_handler": ("AttentionBackendRegistry",),
    f"{_DEEPSEEK}.attention_forward_methods.forward_methods": ("AttnForwardMethod",),
    "sglang.srt.layers.radix_attention": ("RadixAttention",),
    "sglang.srt.mem_cache.memory_pool": ("MLATokenToKVPool", "ReqToTokenPool"),
    "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin": ("ForwardBatchDeepSeekMHAMixin",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch", "ForwardMode"),
    "sglang.srt.plugins.hook_registry": ("HookRegistry", "HookType"),
    "sglang.srt.speculative.draft_utils": ("DraftBackendFactory",),
    "sglang.srt.speculative.eagle_info": ("EagleVerifyInput",),
    "sglang.srt.speculative.ngram_info": ("NgramVerifyInput",),
}
"""Classes that ours extend or read, by module."""

NAMES = {
    "sglang.srt.configs.hybrid_arch": ("mambaish_config",),
    f"{_ATTENTION}.attention_registry": ("register_attention_backend",),
    "sglang.srt.layers.moe.utils": ("is_tbo_enabled",),
    f"{_DEEPSEEK}.utils": ("FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",),
    "sglang.srt.model_executor.forward_batch_info": ("build_inner_fb_view",),
    "sglang.srt.runtime_context": (
        "get_exec",
        "get_memory",
        "get_parallel",
        "get_schedule",
        "get_spec",
    ),
    "sglang.srt.server_args": (
        "add_attention_backend_choices",
        "add_chunked_prefix_cache_attention_backend",
        "add_deterministic_attention_backend_choices",
        "add_radix_supported_deterministic_attention_backend_choices",
    ),
    "sglang.srt.speculative.eagle_utils": ("TreeMaskMode",),
}
"""What else ours import, by module: functions, tables, or names imported from elsewhere."""

CALLERS = (
    f"{_ATTENTION}.base_attn_backend",
    f"{_DEEPSEEK}.attention_forward_methods.forward_mha",
    f"{_DEEPSEEK}.attention_forward_methods.forward_mla",
    f"{_RUNNERS}.decode_cuda_graph_runner",
    "sglang.srt.speculative.draft_utils",
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
)
"""Modules that call ours."""

CALLED = frozenset(
    {
        "_create_backend",
        "attn_mha",
        "attn_mqa",
        "forward_decode",
        "forward_extend",
        "get_cuda_graph_seq_len_fill_value",
        "init_cuda_graph_state",
        "init_forward_metadata",
        "init_forward_metadata_in_graph",
        "init_forward_metadata_out_graph",
    }
)
"""Methods of ours, and layers that hand on to them, whose arguments matter."""


def record_sglang(site: Path, version: str) -> dict[str, Any]:
    """Return the surface of the SGLang in a folder."""
    found = record(site, version, classes=CLASSES, callers=CALLERS, called=CALLED)
    found["names"] = {
        module: ", ".join(sorted(set(wanted) & set(_names(parse(site, module)))))
        for module, wanted in NAMES.items()
    }
    runner = parse(site, "sglang.srt.model_executor.model_runner")
    [node] = [n for n in runner.body if isinstance(n, ast.ClassDef) and n.name == "ModelRunner"]
    found["runner"] = ", ".join(sorted(assigned(node)))
    return found


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module defines or imports at its top."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


if __name__ == "__main__":
    write(SURFACES, record_sglang)
