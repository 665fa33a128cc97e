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
"""The attention that is served, and the file that defines it."""


class LatentPool(Uncopied):
    """What the caches of one model share; a block holds the same tokens in every layer.

    Blocks may be in several rows, and in several caches, at once; one that is goes into a copy
    before it is written. Forwards over a pool do not overlap, whatever their caches: one that
    begins while another is under way, in another thread or around it, is refused.

    Parameters
    ----------
    model : PreTrainedModel
        DeepSeek-V2 or V3, or a model that has one inside; on one device, in float32, float16 or
        bfloat16. Its attention modules will hand latents on where they meet a
        :class:`PagedMlaCache`, and work as before with any other cache.
    num_blocks : int
        Tokens of all rows of all caches fit ``num_blocks * block_size``, each row's last block
        partly filled. The pool takes ``layers * num_blocks * block_size * (R + P)`` numbers of the
        model's dtype.
    block_size : int
    max_rows : int
        Largest batch, beams and returned sequences counted.
    max_step_tokens : int
        Most tokens of one forward, padding not counted.
    max_length : int or None
        Longest row; ``None`` takes the model's ``max_position_embeddings``.

    Raises
    ------
    InvalidArgument
        A size that is no integer, or below 1; no model.
    Unsupported
        Another attention, or one of a sliding window; a ``kv_b_proj`` that is adapted, hooked,
        patched, quantized, offloaded or cut in parts; layers that scale scores differently, or
        differ in dtype or device.
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
        with torch.inference_mode(mode=False):  # else torch writes to them in that mode alone
            self.mla = MlaLayer(config, weight.device)
            """The kernels; one plan serves all layers of a step."""
            self.latents = torch.empty(shape, dtype=weight.dtype, device=weight.device)
            """[layers, num_blocks, block_size, R + P]."""
        self.step: object = None
        """The step that the kernels are planned for."""
        names = [name for name, module in model.named_modules() if module in modules]
        self.turns = Turns(model, names)
        """The forward that it is in."""
        self._modules = [weakref.ref(module) for module in modules]
        self._depth = self.model_config.num_hidden_layers
        self._owners = np.zeros(num_blocks, dtype=np.int64)
        self._free = list(reversed(range(num_blocks)))
        for module in modules:
            take_latents(module)

    @property
    def config(self) -> MlaConfig:
        """Sizes and capacities."""
        return self.mla.config.attention

    @property
    def num_free(self) -> int:
        """Blocks in no row."""
        return len(self._free)

    def serves(self, module: nn.Module, layer: int) -> bool:
        """Whether this pool's `layer` holds what `module` writes."""
        return self._modules[layer]() is module

    def check_modules(self, layer: int) -> None:
        """Check what the kernels take for granted, which may have changed since the pool was made.

        Of the first layer's turn all modules are checked, so that nothing has changed where one is
        refused; of a later turn that layer's once more, since hooks may have changed it meanwhile.

        Raises
        ------
        InvalidArgument
            The model has another dtype or number of layers, or is on another device.
        Unsupported
            As :class:`LatentPool` says.
        """
        modules = (reference() for reference in self._modules[layer : layer + 1 if layer else None])
        present = [module for module in modules if module is not None]
        _check_modules(present, self.config.softmax_scale)
        weight = present[0].kv_b_proj.weight
        now, then = ((at.dtype, at.device) for at in (weight, self.latents))
        if now != then:
            given, as_before = (f"{dtype} on {device}" for dtype, device in (now, then))
            allowed = f"{as_before}, as its LatentPool was made for; or make another pool of it"
            raise InvalidArgument("model", given, allowed)
        depth = self.model_config.num_hidden_layers
        if depth != self._depth:
            allowed = f"{self._depth}, as when its LatentPool was made"
            raise InvalidArgument("model.config.num_hidden_layers", depth, allowed)

    def check_expansion(self, layer: int) -> None:
        """Check the ``expand_kv`` that latents of a layer are about to be handed to.

        Raises
        ------
        Unsupported
            It is not the library's own, which they pass by.
        """
        module = self._modules[layer]()
        if module is not None:
            check_expansion(module, _library_of(module), pass_on)

    def take(self, count: int) -> list[int]:
        """Return blocks that nobody has.

        Raises
        ------
        InvalidArgument
            There are fewer; none is taken then.
        """
        if count > len(self._free):
            given = f"{len(self._owners)}, of which {len(self._free)} are free"
            allowed = f"{count} free ones for this step; reset or drop caches that are done with"
            raise InvalidArgument("num_blocks", given, allowed)
        taken = [self._free.pop() for _ in range(count)]
        self._owners[taken] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Give each block one more owner."""
        for block in blocks:
            self._owners[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block; one without any is free."""
        for block in blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def num_owners(self, block: int) -> int:
        """Rows that have a block; none of several may write to it."""
        return int(self._owners[block])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks in all layers."""
        self.latents[:, list(targets)] = self.latents[:, list(sources)]


def attention_modules(model: nn.Module) -> list[Any]:
    """Return the attention of each layer, in order.

    Raises
    ------
    Unsupported
        As :class:`LatentPool` says.
    """
    known: list[Any] = [part for part in model.modules() if isinstance(part, tuple(LIBRARY))]
    names = " or ".join(attention.__name__ for attention in LIBRARY)
    if not known:
        raise Unsupported(f"{type(model).__name__}: no layer is a {names}")
    if [module.layer_idx for module in known] != list(range(len(known))):
        raise Unsupported(f"{type(model).__name__}: layers other than {names}")
    window = getattr(known[0].config, "sliding_window", None)
    if window is not None:
        raise Unsupported(f"sliding_window {window}: every query sees all of its row")
    _check_modules(known, known[0].scaling)
    return known


def _check_modules(modules: Sequence[Any], scaling: float) -> None:
    check_calls()
    placed = None
    for module in modules:
        if module.scaling != scaling:
            raise Unsupported(f"scaling {module.scaling} beside {scaling}: one for all layers")
        per_head = module.qk_nope_head_dim + module.v_head_dim
        shape = (module.num_heads * per_head, module.kv_lora_rank)
        check_projection(module.layer_idx, module.kv_b_proj, shape)
        check_expansion(module, _library_of(module), pass_on)
        weight = module.kv_b_proj.weight
        here = weight.dtype, weight.device
        placed = placed or here
        if here != placed:
            given = " and ".join(f"{dtype} on {device}" for dtype, device in (placed, here))
            raise Unsupported(f"layers of {given}: one dtype on one device")


def _library_of(module: nn.Module) -> ModuleType:
    """Return the file of the library that defines a module's class, or the one that it extends."""
    return next(file for known, file in LIBRARY.items() if isinstance(module, known))
