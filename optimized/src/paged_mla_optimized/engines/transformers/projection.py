"""Check ``kv_b_proj``, whose weight absorbed attention reads in place of a call of the module.

Absorbed attention multiplies queries and outputs with this weight (S-21) and never calls the
module. The module must therefore compute the product with its weight and nothing else. Libraries
change the computation of a module in several places, and this file checks all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import linear as torch_linear
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_shared.errors import Unsupported

_OF_THE_CLASS = ("_slow_forward", "_call_impl", "_wrapped_call_impl")
_CALLED = ("forward", *_OF_THE_CLASS, "_compiled_call_impl")
_OF_ACCELERATE = ("_hf_hook", "_old_forward")
_LOST = "paged_mla reads the weight and does not call the module; remove"


def check_calls() -> None:
    """Check the settings of torch that affect the calls of all modules.

    Raises
    ------
    Unsupported
        There are global hooks of modules, functions of torch are patched, or a mode of torch is
        active that may observe or change their results.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        what = "hooks that are registered for all modules (register_module_forward_hook)"
        raise Unsupported(f"kv_b_proj has {what}: {_LOST} them")
    if not (
        _is_defined_in(torch_linear, nn.Linear.forward, "forward")
        and _is_defined_in(torch_module, nn.Linear.__call__, "_wrapped_call_impl")
        and all(
            _is_defined_in(torch_module, getattr(nn.Linear, name), name) for name in _OF_THE_CLASS
        )
        and nn.Linear._compiled_call_impl is None
        and nn.functional.linear is torch._C._nn.linear
    ):
        patched = "nn.Linear.forward, nn.Module.__call__ or nn.functional.linear"
        raise Unsupported(f"kv_b_proj runs another {patched} than torch's: {_LOST} the patch")
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    for mode in (*functions, *_get_current_dispatch_mode_stack()):
        if type(mode) is not DeviceContext:  # the mode of torch.set_default_device
            kind = type(mode)
            what = f"a mode of torch, {kind.__qualname__} of {kind.__module__}"
            raise Unsupported(f"kv_b_proj runs under {what}: {_LOST} the mode")


def check_projection(layer: int, projection: Any, shape: tuple[int, int]) -> None:
    """Check that a module computes ``x @ weight.T`` with a weight that the kernels can read.

    Parameters
    ----------
    layer : int
        The number of the layer, for the message.
    projection : Module
        ``kv_b_proj`` of this layer.
    shape : (int, int)
        The required shape of the weight, ``H * (N + V)`` and R.

    Raises
    ------
    Unsupported
        The module has another class, hooks, a patched method, a bias or another kind of weight; the
        message names the difference.
    """
    found = next(_deviations(projection, shape), None)
    if found is not None:
        what, remedy = found
        raise Unsupported(f"kv_b_proj {what} (layer {layer}): {remedy}")


def check_expansion(module: Any, library: ModuleType, expand: Any) -> None:
    """Check that ``expand_kv``, which this package does not call either, is the library's method.

    Parameters
    ----------
    module : Module
        A DeepSeek attention.
    library : module
        The module of the library that defines its class.
    expand : callable
        The function that a pool has set in place of ``expand_kv``.

    Raises
    ------
    Unsupported
        A subclass, an instance or the class itself has another ``expand_kv``.
    """
    own = vars(module).get("expand_kv")
    if isinstance(own, partial) and own.func is expand:
        own = own.args[0]
    is_bound = own is None or _is_method_of(own, module, "expand_kv")
    if not is_bound or not _is_defined_in(library, type(module).expand_kv, "expand_kv"):
        given = f"expand_kv of a {type(module).__name__} is not the library's own"
        raise Unsupported(
            f"{given} (layer {module.layer_idx}): paged_mla does not call it; remove it"
        )


def _deviations(projection: Any, shape: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Yield a description and a remedy for each difference from a plain ``nn.Linear``."""
    kind = type(projection)
    if kind is not nn.Linear:
        remedy = "merge adapters (peft: merge_and_unload()), or load an unquantized nn.Linear"
        yield f"is a {kind.__qualname__} of {kind.__module__}", remedy
    if any(name in vars(projection) for name in _OF_ACCELERATE):
        remedy = f"{_LOST} it (remove_hook_from_module), and load the model without offloading"
        yield "has a hook of accelerate", remedy
    for name in _CALLED:
        own = vars(projection).get(name)
        if own is not None and not _is_method_of(own, projection, name):
            yield f"has a {name} of its own", f"{_LOST} it"
    if projection._forward_hooks or projection._forward_pre_hooks:
        yield "has hooks", f"{_LOST} them"
    if projection.bias is not None:
        yield "has a bias", "paged_mla reads only the weight; use a kv_b_proj without a bias"
    yield from _deviations_of_weight(getattr(projection, "weight", None), shape)


def _deviations_of_weight(weight: Any, shape: tuple[int, int]) -> Iterator[tuple[str, str]]:
    kind = type(weight)
    if kind not in {nn.Parameter, torch.Tensor}:
        remedy = "use a plain tensor, neither quantized nor distributed over devices"
        yield f"has a weight that is a {kind.__qualname__} of {kind.__module__}", remedy
    if weight.is_meta:
        yield "has a weight on the meta device", "load it without offloading, on one device"
    if weight.layout is not torch.strided:
        yield f"has a weight of layout {weight.layout}", "use a dense weight"
    if weight.dtype not in DTYPE_NAMES:
        yield f"has a weight of dtype {weight.dtype}", "use float32, float16 or bfloat16"
    if tuple(weight.shape) != shape:
        remedy = f"use a weight of shape {[*shape]}, with all heads on one device"
        yield f"has a weight of shape {[*weight.shape]}", remedy


def _is_method_of(given: Any, owner: object, name: str) -> bool:
    """Return whether an attribute is the bound method of the owner's own class.

    Libraries leave this method as an attribute of the instance when they remove a hook.
    """
    plain = getattr(type(owner), name)
    return getattr(given, "__self__", None) is owner and getattr(given, "__func__", None) is plain


def _is_defined_in(library: ModuleType, function: Any, name: str) -> bool:
    """Return whether a function's own code is defined in `library` under `name`.

    A wrapper of that function does not count, even if it copies the name.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    return bool(code.co_filename == library.__file__ and code.co_qualname.endswith(f".{name}"))
