"""The library's attention interface: latents in, absorbed or materialized by this package."""

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
OF_THIS_MODEL = "a cache of a pool of this model"
NOT_SERVED = ("softcap", "s_aux", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k")
"""What other implementations take beside queries, keys and values."""


class ServedRows(Protocol):
    """The rows of a cache, as attention calls them."""

    def check_module(self, module: Any, layer: int) -> None:
        """Check that a module is the one of a layer."""

    def attend(
        self,
        module: Any,
        layer: int,
        query: torch.Tensor,
        latents: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Append a layer's latents, and return what its rows attend to."""


@dataclass(frozen=True)
class Latents:
    """What a cache layer hands to the attention in place of keys.

    Parameters
    ----------
    rows : ServedRows
    layer : int
    ckv : dtype [B, 1, T, R]
    k_pe : dtype [B, 1, T, P]
        Rotated by the module.
    """

    rows: ServedRows
    layer: int
    ckv: torch.Tensor
    k_pe: torch.Tensor

    @property
    def shape(self) -> NoReturn:
        """What attention that was not told of a pool asks its keys for first.

        Raises
        ------
        InvalidArgument
            Always.
        """
        raise InvalidArgument("cache", "a cache of another model", OF_THIS_MODEL)


def register() -> None:
    """Make the implementation known to the library under its name."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, keep_mask)
    refuse_assistants()


def refuse_assistants() -> None:
    """Have the library refuse an assistant of this implementation before it sets one up.

    ``generate`` gives an assistant a cache of the library's own. For an early exit the assistant
    is the model itself, with fewer layers in its configuration until its tokens are there: an
    error in between would leave them out of every later forward.
    """
    set_up = AssistedCandidateGenerator.__init__

    @wraps(set_up)
    def refuse_or_set_up(
        self: Any, input_ids: torch.Tensor, assistant_model: Any, *args: Any, **kwargs: Any
    ) -> None:
        if assistant_model.config._attn_implementation == NAME:
            if isinstance(self, EarlyExitCandidateGenerator):
                raise Unsupported(
                    f"assistant_early_exit with {NAME}: early layers would draft over a cache of "
                    "the library's own; generate without it, or with an assistant_model"
                )
            raise Unsupported(
                f"an assistant on {NAME}: generate() gives it a cache of the library's own; "
                'assistant_model.set_attn_implementation("eager")'
            )
        set_up(self, input_ids, assistant_model, *args, **kwargs)

    AssistedCandidateGenerator.__init__ = refuse_or_set_up


def take_latents(module: Any) -> None:
    """Let a module hand latents on; keys of any other cache are expanded as before."""
    if not isinstance(module.expand_kv, partial):
        module.expand_kv = partial(pass_on, module.expand_kv)


def pass_on(expand_kv: Any, ckv: Any, k_pe: torch.Tensor) -> Any:
    """Return latents as they are, and what the library makes of anything else."""
    return (ckv, k_pe) if isinstance(ckv, Latents) else expand_kv(ckv, k_pe)


def keep_mask(
    *, mask_function: Any, attention_mask: torch.Tensor | None = None, **_kwargs: Any
) -> torch.Tensor | None:
    """Return the padding of a batch as it is: causality needs no tensor here.

    Raises
    ------
    Unsupported
        The model asks for another mask than a causal one.
    """
    if mask_function is not causal_mask_function:
        raise Unsupported("attention masks other than causal with padding")
    return attention_mask


def check_plain(*inputs: torch.Tensor) -> None:
    """Check that numbers in memory, which kernels see, are all that torch wants of tensors.

    Raises
    ------
    Unsupported
        Gradients backwards or forwards, a transform of ``torch.func``, or a trace.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise Unsupported("gradients: call the model under torch.no_grad()")
    if any(is_functorch_wrapped_tensor(tensor) for tensor in inputs):
        raise Unsupported("transforms of torch.func (vmap, jvp, grad): call the model outside them")
    duals = [unpack_dual(tensor) for tensor in inputs]  # type: ignore[no-untyped-call]
    if any(dual.tangent is not None for dual in duals):
        raise Unsupported("forward-mode gradients (torch.autograd.forward_ad): kernels have none")
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise Unsupported("torch.jit.trace: it would keep the answers of this step as constants")


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
    """Append what a :class:`PagedMlaCache` handed over, and attend to its rows.

    Parameters
    ----------
    module : DeepseekV2Attention or DeepseekV3Attention
    query : dtype [B, H, T, N + P]
    key : Latents
    value : dtype [B, 1, T, P]
        ``key.k_pe`` again.
    attention_mask : bool [B, columns] or None
    dropout : float
        0.

    Returns
    -------
    out : dtype [B, T, H, V]
    weights : None

    Raises
    ------
    InvalidArgument
        Another cache or mask, or something that is larger than the pool was made for.
    Unsupported
        What these kernels do not do: gradients, transforms and traces of torch, dropout, weights
        as an output, scores that are capped or windowed, packed rows; a module that changes what
        its cache returned.
    """
    if not isinstance(key, Latents):
        given = "none, or one of the library's own, as generate() makes where it is given none"
        allowed = f'PagedMlaCache(pool); or model.set_attn_implementation("eager"), not "{NAME}"'
        raise InvalidArgument("cache", given, allowed)
    if value is not key.k_pe:
        given = f"{type(module).__name__} changes values behind its cache"
        raise Unsupported(f"{given} (layer {key.layer}): they are not read, latents are")
    scaling = kwargs.get("scaling", module.scaling)
    if scaling != module.scaling:
        raise Unsupported(f"scaling {scaling} beside the module's own, {module.scaling}: that one")
    for name in NOT_SERVED:
        if kwargs.get(name) is not None:
            raise Unsupported(f"{name}: causal attention over whole rows, without it")
    if attention_mask is not None and attention_mask.ndim != 2:
        given = f"shape {[*attention_mask.shape]}"
        raise InvalidArgument("attention_mask", given, "[B, columns] of padding")
    if dropout > 0:
        raise Unsupported(f"attention_dropout {dropout} while training: model.eval()")
    key.rows.check_module(module, key.layer)  # then its weight may be looked at
    check_plain(query, key.ckv, key.k_pe, module.kv_b_proj.weight)
    if kwargs.get("output_attentions"):
        raise Unsupported("output_attentions: weights are never written")
    return key.rows.attend(module, key.layer, query, (key.ckv, key.k_pe), attention_mask), None
