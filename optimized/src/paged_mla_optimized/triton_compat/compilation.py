"""Run Triton's compiler for any architecture, without a GPU."""

from __future__ import annotations

from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from paged_mla_optimized.triton_compat.kernels import is_gluon

CompilationError = triton.TritonError
"""The exception of the compiler for a kernel that it cannot compile."""


def source_of(
    kernel: Any, signature: dict[str, Any], constants: dict[Any, Any], attributes: dict[Any, Any]
) -> Any:
    """Return the compiler's source object; constants and attributes are keyed by path."""
    kind = GluonASTSource if is_gluon(kernel) else ASTSource
    return kind(kernel, signature, constants, attributes)


def compiled(source: Any, arch: str, options: dict[str, Any]) -> Any:
    """Return the compiled kernel, whose ``asm["cubin"]`` is the binary.

    Parameters
    ----------
    source : result of ``source_of``
    arch : str
        For example "sm90".
    options : dict
        Options of the compiler.
    """
    return triton.compile(source, target=_target(arch), options=options)


def first_stage(source: Any, arch: str, options: dict[str, Any]) -> str:
    """Return the intermediate representation of the compiler's first stage, without line info."""
    target = _target(arch)
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generated = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(target, parsed, *generated, context)
    stage = backend.gluon_to_ttgir if is_gluon(source.fn) else backend.make_ttir
    text: str = stage(module, {}, parsed, target.arch).str_nodebug()
    return text


def _target(arch: str) -> Any:
    return GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
