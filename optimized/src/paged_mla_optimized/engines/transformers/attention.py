"""The attention and mask functions that are registered in the transformers library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn, Protocol

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual
from transformers import AttentionInterface
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    EarlyExitCandidateGenerator,
)
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from paged_mla_shared.errors import InvalidArgument, Unsupported

NAME = "paged_mla"
OF_THIS_MODEL = "a PagedMlaCache of a LatentPool of this model"
NOT_SERVED = ("softcap", "s_aux", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of other attention implementations that this one does not support."""


class ServedRows(Protocol):
    """The methods of a cache's rows that the attention function calls."""

    def check_module(self, module: Any, layer: int) -> None:
        """Check that `module` is the attention module of `layer`."""

    def attend(
        self,
        module: Any,
        layer: int,
        query: torch.Tensor,
        latents: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Append a layer's latents, and return the attention outputs of its rows."""


@dataclass(frozen=True)
class Latents:
    """The object that a cache layer passes to the attention function in place of keys.

    Parameters
    ----------
    rows : ServedRows
    layer : int
    ckv : dtype [B, 1, T, R]
        The latents of the new tokens.
    k_pe : dtype [B, 1, T, P]
        The keys that the module has rotated.
    """

    rows: ServedRows
    layer: int
    ckv: torch.Tensor
    k_pe: torch.Tensor

    @property
    def shape(self) -> NoReturn:
        """Raise an error, because keys of another attention implementation would be read here.

        Other implementations read the shape of their keys first. They get this object if a model
        without a pool is called with a :class:`PagedMlaCache`.

        Raises
        ------
        InvalidArgument
            Always.
        """
        raise InvalidArgument("cache", "a cache of another model", OF_THIS_MODEL)


def register() -> None:
    """Register the attention and mask functions under :data:`NAME`, and reject assistants."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, keep_mask)
    refuse_assistants()


def refuse_assistants() -> None:
    """Make the library reject an assistant model of this implementation at its creation.

    ``generate`` creates a cache of the library for an assistant, which this implementation cannot
    use. For an early exit the assistant is the model itself, and the library reduces the number of
    layers in its configuration while it drafts. An error during the draft would leave this reduced
    number in place for every later forward.
    """
    set_up = AssistedCandidateGenerator.__init__

    @wraps(set_up)
    def refuse_or_set_up(
        self: Any, input_ids: torch.Tensor, assistant_model: Any, *args: Any, **kwargs: Any
    ) -> None:
        if assistant_model.config._attn_implementation == NAME:
            if isinstance(self, EarlyExitCandidateGenerator):
                raise Unsupported(
                    f"assistant_early_exit is not supported by {NAME}, because the early layers "
                    "would draft over a cache of transformers; generate without it, or with an "
                    "assistant_model"
                )
            raise Unsupported(
                f"an assistant model with the attention {NAME} is not supported, because "
                "generate() creates a cache of transformers for it; call "
                'assistant_model.set_attn_implementation("eager")'
            )
        set_up(self, input_ids, assistant_model, *args, **kwargs)

    AssistedCandidateGenerator.__init__ = refuse_or_set_up


def take_latents(module: Any) -> None:
    """Make a module pass latents on; it expands the keys of any other cache as before."""
    if not isinstance(module.expand_kv, partial):
        module.expand_kv = partial(pass_on, module.expand_kv)


def pass_on(expand_kv: Any, ckv: Any, k_pe: torch.Tensor) -> Any:
    """Return :class:`Latents` unchanged, and the library's expansion of any other keys."""
    return (ckv, k_pe) if isinstance(ckv, Latents) else expand_kv(ckv, k_pe)


def keep_mask(
    *, mask_function: Any, attention_mask: torch.Tensor | None = None, **_kwargs: Any
) -> torch.Tensor | None:
    """Return the padding mask of a batch unchanged: the kernels are causal without a mask tensor.

    Raises
    ------
    Unsupported
        The model requests a mask that is not causal.
    """
    if mask_function is not causal_mask_function:
        raise Unsupported(
            "attention masks other than a causal mask with padding are not supported by "
            "paged_mla; use a model with causal attention"
        )
    return attention_mask


def check_plain(*inputs: torch.Tensor) -> None:
    """Check that the tensors need nothing but their values in memory, which the kernels read.

    Raises
    ------
    Unsupported
        A tensor needs a gradient or has a forward-mode tangent, a transform of ``torch.func`` wraps
        it, or ``torch.jit.trace`` is active.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise Unsupported(
            "gradients are not supported by paged_mla; call the model under torch.no_grad()"
        )
    if any(is_functorch_wrapped_tensor(tensor) for tensor in inputs):
        raise Unsupported(
            "transforms of torch.func (vmap, jvp, grad) are not supported by paged_mla; "
            "call the model outside of them"
        )
    duals = [unpack_dual(tensor) for tensor in inputs]  # type: ignore[no-untyped-call]
    if any(dual.tangent is not None for dual in duals):
        raise Unsupported(
            "forward-mode gradients (torch.autograd.forward_ad) are not supported by paged_mla; "
            "call the model with tensors that have no tangent"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise Unsupported(
            "torch.jit.trace is not supported by paged_mla, because a trace would keep the "
            "outputs of this step as constants; call the model without a trace"
        )


@torch.compiler.disable(  # type: ignore[no-untyped-call] # torch gives it no types
    reason="a step of paged_mla is described on the host"
)
def attend(  # noqa: PLR0917 - the library's signature
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Append the latents of a :class:`PagedMlaCache`, and compute the attention over its rows.

    Parameters
    ----------
    module : DeepseekV2Attention or DeepseekV3Attention
    query : dtype [B, H, T, N + P]
    key : Latents
    value : dtype [B, 1, T, P]
        The same tensor as ``key.k_pe``.
    attention_mask : bool [B, columns] or None
        True for tokens and False for padding, over the cached columns and the new ones; ``None``
        without padding.
    dropout : float
        Must be 0.
    **kwargs
        ``scaling`` must be the module's own. ``output_attentions`` must be false, and every
        argument in :data:`NOT_SERVED` must be ``None``. Other arguments are not read.

    Returns
    -------
    out : dtype [B, T, H, V]
    weights : None

    Raises
    ------
    InvalidArgument
        The cache is not a :class:`PagedMlaCache` of this model, the mask is not a padding mask, or
        the step exceeds a size of the pool.
    Unsupported
        The call needs a feature that the kernels do not have: gradients, transforms and traces of
        torch, dropout, attention weights as an output, a soft cap, a sliding window or packed
        sequences. Or the module changes the values that its cache returned.
    """
    if not isinstance(key, Latents):
        given = "no cache, or a cache of transformers, which generate() creates by default"
        allowed = f'PagedMlaCache(pool) with "{NAME}", or model.set_attn_implementation("eager")'
        raise InvalidArgument("cache", given, allowed)
    if value is not key.k_pe:
        given = f"{type(module).__name__} changes the values that its cache returned"
        raise Unsupported(
            f"{given} (layer {key.layer}), but paged_mla reads latents instead of values; "
            "use the attention class of transformers without changes"
        )
    scaling = kwargs.get("scaling", module.scaling)
    if scaling != module.scaling:
        raise Unsupported(
            f"scaling={scaling} is not supported by paged_mla; "
            f"use the scaling of the attention module, {module.scaling}"
        )
    for name in NOT_SERVED:
        if kwargs.get(name) is not None:
            raise Unsupported(
                f"the attention argument {name} is not supported by paged_mla; "
                "call the model without it"
            )
    if attention_mask is not None and attention_mask.ndim != 2:
        given = f"shape {[*attention_mask.shape]}"
        raise InvalidArgument("attention_mask", given, "a padding mask of shape [B, columns]")
    if dropout > 0:
        raise Unsupported(
            f"attention_dropout={dropout} is not supported by paged_mla; call model.eval()"
        )
    key.rows.check_module(module, key.layer)  # before the weight of the module is read
    check_plain(query, key.ckv, key.k_pe, module.kv_b_proj.weight)
    if kwargs.get("output_attentions"):
        raise Unsupported(
            "output_attentions is not supported by paged_mla, because its kernels do not write "
            'attention weights; call model.set_attn_implementation("eager")'
        )
    return key.rows.attend(module, key.layer, query, (key.ckv, key.k_pe), attention_mask), None
