"""Record what the classes of ``engines/vllm`` meet of a release of vLLM, from its sources.

    pip download vllm==0.33.0 --no-deps && unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d SITE
    python optimized/tests/engines/record_vllm.py SITE 0.33.0

writes ``vllm_surfaces/0.33.0.json`` beside this file. Nothing of vLLM is imported or run.
"""

from __future__ import annotations

import ast
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SURFACES = Path(__file__).parent / "vllm_surfaces"

CLASSES = {
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
        "builder_cls",
        "forward_mqa",
        "get_kv_cache_stride_order",
        "get_supported_head_sizes",
        "get_supported_kernel_block_sizes",
        "impl_cls",
        "prefill_backend_cls",
        "prepare_metadata",
        "register_backend",
        "register_mla_prefill_backend",
        "run_prefill_context_chunk",
        "run_prefill_new_tokens",
        "supports_combination",
        "supports_compute_capability",
    }
)
"""Methods of ours, and functions that we call, whose arguments matter."""


def record(site: Path, version: str) -> dict[str, Any]:
    """Return the surface of the vLLM in a folder."""
    modules: dict[str, Any] = {}
    for module, wanted in CLASSES.items():
        tree = _parse(site, module)
        classes = {
            node.name: _class(node)
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name in wanted
        }
        functions = {
            node.name: parameters(node)
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name in CALLED
        }
        modules[module] = {"classes": classes, "functions": functions}
    calls: dict[str, list[str]] = {}
    for module in CALLERS:
        for name, shape in _calls(_parse(site, module)):
            if shape not in calls.setdefault(name, []):
                calls[name].append(shape)
    return {"version": version, "modules": modules, "calls": dict(sorted(calls.items()))}


def parameters(function: ast.FunctionDef) -> str:
    """Return the parameters but self and cls, without types, "..." for every default."""
    given = copy.deepcopy(function.args)
    given.args = [arg for arg in given.args if arg.arg not in {"self", "cls"}]
    for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if arg is not None:
            arg.annotation = None
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(...) for default in given.kw_defaults]
    return ast.unparse(given)


def assigned(node: ast.ClassDef) -> set[str]:
    """Return what methods of a class set on ``self``."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def fields(node: ast.ClassDef) -> list[str]:
    """Return what a class body declares or sets, in order."""
    found = []
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found.append(line.target.id)
        elif isinstance(line, ast.Assign):
            found += [target.id for target in line.targets if isinstance(target, ast.Name)]
    return found


def methods(node: ast.ClassDef) -> dict[str, str]:
    """Return the parameters of each method of a class."""
    return {line.name: parameters(line) for line in node.body if isinstance(line, ast.FunctionDef)}


def _class(node: ast.ClassDef) -> dict[str, Any]:
    inner = [line for line in node.body if isinstance(line, ast.ClassDef)]
    return {
        "bases": ", ".join(ast.unparse(base).split("[")[0] for base in node.bases),
        "fields": ", ".join(fields(node)),
        "attributes": ", ".join(sorted(assigned(node))),
        "methods": methods(node),
        "classes": {one.name: _class(one) for one in inner},
    }


def _calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the shape of each call: "_" stands for what is passed."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if isinstance(node.func, ast.Call) and ast.unparse(node.func).endswith("get_builder_cls()"):
            name = "builder_cls"
        if name in CALLED:
            words = [f"{word.arg}=_" for word in node.keywords if word.arg is not None]
            yield name, ", ".join(["_"] * len(node.args) + words)


def _parse(site: Path, module: str) -> ast.Module:
    return ast.parse((site / module.replace(".", "/")).with_suffix(".py").read_text())


def main() -> None:
    """Write one surface."""
    site, version = Path(sys.argv[1]), sys.argv[2]
    SURFACES.mkdir(exist_ok=True)
    text = json.dumps(record(site, version), indent=1)
    (SURFACES / f"{version}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
