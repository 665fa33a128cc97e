"""Blocks of latents of all layers of one model, and the kernels that read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from paged_mla_optimized.api.layer import MlaLayer
from paged_mla_optimized.config.arguments import check_at_least, check_kind
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.layer import LayerConfig
from paged_mla_optimized.engines.transformers.attention import pass_on, take_latents
from paged_mla_optimized.engines.transformers.projection import (
    check_calls,
    check_expansion,
    check_projection,
)
from paged_mla_optimized.engines.transformers.turns import Turns
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_shared.errors import InvalidArgument, Unsupported

LIBRARY: dict[type[nn.Module], ModuleType] = {
    v2.DeepseekV2Attention: v2,
    v3.DeepseekV3Attention: v3,
}
"""The supported attention classes, and the module of the library that defines each."""


class LatentPool(Uncopied):
    """The blocks of latents that all caches of one model share.

    A block contains the same tokens in every layer. Several rows and several caches may share a
    block; a row copies a shared block before it writes to it. Only one forward at a time may use a
    pool, with any of its caches. A second forward raises an error if it starts during the first
    one, in another thread or nested inside it.

    Parameters
    ----------
    model : PreTrainedModel
        DeepSeek-V2 or V3, or a model that contains one; on one device, in float32, float16 or
        bfloat16. The constructor changes its attention modules so that they pass on the latents of
        a :class:`PagedMlaCache`. They work as before with any other cache.
    num_blocks : int
        The number of blocks. All rows of all caches together have space for
        ``num_blocks * block_size`` tokens, and the last block of each row may be partly filled. The
        pool has ``layers * num_blocks * block_size * (R + P)`` elements of the model's dtype.
    block_size : int
    max_rows : int
        The largest batch, with beams and returned sequences counted.
    max_step_tokens : int
        The largest number of tokens in one forward, without padding.
    max_length : int or None
        The length of the longest row; ``None`` means the model's ``max_position_embeddings``.

    Raises
    ------
    InvalidArgument
        A size is not an integer, is below 1 or exceeds its limit in :class:`MlaConfig`; or `model`
        is not a module.
    Unsupported
        The model has another attention or a sliding window; a ``kv_b_proj`` is adapted, hooked,
        patched, quantized, offloaded or divided; layers differ in softmax scale, dtype or device.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_blocks: int,
        *,
        block_size: int = 64,
        max_rows: int = 16,
        max_step_tokens: int = 8192,
        max_length: int | None = None,
    ) -> None:
        check_kind("model", model, nn.Module)
        sizes = {"block_size": block_size, "max_rows": max_rows, "max_step_tokens": max_step_tokens}
        check_at_least(1, num_blocks=num_blocks, **sizes)
        if max_length is not None:
            check_at_least(1, max_length=max_length)
        modules = attention_modules(model)
        first, weight = modules[0], modules[0].kv_b_proj.weight
        self.model_config = first.config
        if max_length is None:
            max_length = self.model_config.max_position_embeddings
        attention = MlaConfig(
            num_heads=first.num_heads,
            softmax_scale=first.scaling,
            block_size=block_size,
            max_rows=max_rows,
            max_query_tokens=max_step_tokens,
            max_model_len=max_length,
            kv_lora_rank=first.kv_lora_rank,
            qk_rope_head_dim=first.qk_rope_head_dim,
            dtype=weight.dtype,
        )
        config = LayerConfig(
            attention=attention,
            qk_nope_head_dim=first.qk_nope_head_dim,
            v_head_dim=first.v_head_dim,
        )
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
        shape = (len(modules), num_blocks, block_size, width)
        # Tensors that are created in inference mode can be written to only in that mode.
        with torch.inference_mode(mode=False):
            self.mla = MlaLayer(config, weight.device)
            """The kernels; one plan describes a step to all layers."""
            self.latents = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            """[layers, num_blocks, block_size, R + P]."""
        self.step: object = None
        """The step of the current plan."""
        names = [name for name, module in model.named_modules() if module in modules]
        self.turns = Turns(model, names)
        """The forward that uses the pool."""
        self._modules = [weakref.ref(module) for module in modules]
        self._depth = self.model_config.num_hidden_layers
        self._owners = np.zeros(num_blocks, dtype=np.int64)
        self._free = list(reversed(range(num_blocks)))
        for module in modules:
            take_latents(module)

    @property
    def config(self) -> MlaConfig:
        """The configuration of the attention."""
        return self.mla.config.attention

    @property
    def num_free(self) -> int:
        """The number of blocks that no row uses."""
        return len(self._free)

    def serves(self, module: nn.Module, layer: int) -> bool:
        """Return whether `module` is the attention module of this pool's `layer`."""
        return self._modules[layer]() is module

    def check_modules(self, layer: int) -> None:
        """Check that the modules still have the properties that the kernels assume.

        For the first layer the method checks all modules, so that an error leaves the cache
        unchanged. For a later layer it checks the layer's module again, because a hook may have
        changed the module since.

        Raises
        ------
        InvalidArgument
            The model has another dtype, device or number of layers than at the pool's creation.
        Unsupported
            A module is not supported, for a reason that :class:`LatentPool` lists.
        """
        modules = (reference() for reference in self._modules[layer : layer + 1 if layer else None])
        present = [module for module in modules if module is not None]
        _check_modules(present, self.config.softmax_scale)
        weight = present[0].kv_b_proj.weight
        now, then = ((at.dtype, at.device) for at in (weight, self.latents))
        if now != then:
            given, as_before = (f"{dtype} on {device}" for dtype, device in (now, then))
            allowed = f"{as_before}, as at the creation of its LatentPool; or create another pool"
            raise InvalidArgument("model", given, allowed)
        depth = self.model_config.num_hidden_layers
        if depth != self._depth:
            allowed = f"{self._depth}, as at the creation of its LatentPool"
            raise InvalidArgument("model.config.num_hidden_layers", depth, allowed)

    def check_expansion(self, layer: int) -> None:
        """Check the ``expand_kv`` of a layer, which the latents will bypass.

        Raises
        ------
        Unsupported
            The ``expand_kv`` is not that of the library.
        """
        module = self._modules[layer]()
        if module is not None:
            check_expansion(module, _library_of(module), pass_on)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks and return their numbers.

        Raises
        ------
        InvalidArgument
            Fewer blocks are free. The method takes none then.
        """
        if count > len(self._free):
            given = f"{len(self._owners)}, of which {len(self._free)} are free"
            allowed = (
                f"at least {count} free blocks for this step; reset or delete caches that are no "
                "longer used, or create a larger pool"
            )
            raise InvalidArgument("num_blocks", given, allowed)
        taken = [self._free.pop() for _ in range(count)]
        self._owners[taken] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each block."""
        for block in blocks:
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one owner from each block; a block without owners is free."""
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def num_owners(self, block: int) -> int:
        """Return the number of rows that use a block. Only a single owner may write to it."""
        return int(self._owners[block])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each source block to its target block, in all layers."""
        self.latents[:, list(targets)] = self.latents[:, list(sources)]


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the attention module of each layer, in order.

    Raises
    ------
    Unsupported
        The model is not supported, for a reason that :class:`LatentPool` lists.
    """
    known: list[Any] = [part for part in model.modules() if isinstance(part, tuple(LIBRARY))]
    names = " or ".join(attention.__name__ for attention in LIBRARY)
    if not known:
        raise Unsupported(
            f"{type(model).__name__} is not supported by paged_mla, because no layer is a {names}; "
            "use a DeepSeek-V2 or V3 model"
        )
    if [module.layer_idx for module in known] != list(range(len(known))):
        raise Unsupported(
            f"{type(model).__name__} is not supported by paged_mla; "
            f"every layer must be a {names}, in the order of layer_idx"
        )
    window = getattr(known[0].config, "sliding_window", None)
    if window is not None:
        raise Unsupported(
            f"sliding_window={window} is not supported by paged_mla; "
            "use a model without sliding-window attention"
        )
    _check_modules(known, known[0].scaling)
    return known


def _check_modules(modules: Sequence[Any], scaling: float) -> None:
    check_calls()
    placed = None
    for module in modules:
        if module.scaling != scaling:
            raise Unsupported(
                f"scaling={module.scaling} of layer {module.layer_idx} is not supported by "
                f"paged_mla in a pool whose softmax scale is {scaling}; use a model whose layers "
                "share one softmax scale"
            )
        per_head = module.qk_nope_head_dim + module.v_head_dim
        shape = (module.num_heads * per_head, module.kv_lora_rank)
        check_projection(module.layer_idx, module.kv_b_proj, shape)
        check_expansion(module, _library_of(module), pass_on)
        weight = module.kv_b_proj.weight
        here = weight.dtype, weight.device
        placed = placed or here
        if here != placed:
            raise Unsupported(
                f"layer {module.layer_idx} has weights of {here[0]} on {here[1]} and layer "
                f"{modules[0].layer_idx} has weights of {placed[0]} on {placed[1]}, which is not "
                "supported by paged_mla; load all layers in one dtype on one device"
            )


def _library_of(module: nn.Module) -> ModuleType:
    """Return the module of the library that defines the class of `module` or its base class."""
    return next(file for known, file in LIBRARY.items() if isinstance(module, known))
