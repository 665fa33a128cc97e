"""The library's attention interface: latents in, absorbed or materialised by this package."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from paged_mla_shared.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from paged_mla_optimized.engines.transformers.rows import Rows

NAME = "paged_mla"
OF_THIS_MODEL = "a cache of a pool of this model"


@dataclass(frozen=True)
class Latents:
    """What a cache layer hands to the attention in place of keys.

    Parameters
    ----------
    rows : Rows
    layer : int
    ckv : dtype [B, 1, T, R]
    k_pe : dtype [B, 1, T, P]
        Rotated by the module.
    """

    rows: Rows
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
        raise InvalidArgument("past_key_values", "a cache of another model", OF_THIS_MODEL)


def register() -> None:
    """Make the implementation known to the library under its name."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, keep_mask)


def take_latents(module: Any) -> None:
    """Let a module hand latents on; keys of any other cache are expanded as before."""
    if not isinstance(module.expand_kv, partial):
        module.expand_kv = partial(_expand, module.expand_kv)


def _expand(expand_kv: Any, ckv: Any, k_pe: torch.Tensor) -> Any:
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


@torch.compiler.disable(  # type: ignore[no-untyped-call] # torch gives it no types
    reason="a step of paged_mla is described on the host"
)
def attend(  # noqa: PLR0917 - the library's signature
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: torch.Tensor,  # noqa: ARG001 - the library's signature
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
    value : Tensor
        Not used.
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
        What these kernels do not do: gradients, dropout, weights as an output.
    """
    if not isinstance(key, Latents):
        allowed = f'a PagedMlaCache; or model.set_attn_implementation("eager"), not "{NAME}"'
        raise InvalidArgument("past_key_values", "None or another cache", allowed)
    if attention_mask is not None and attention_mask.ndim != 2:
        given = f"shape {[*attention_mask.shape]}"
        raise InvalidArgument("attention_mask", given, "[B, columns] of padding")
    if dropout > 0:
        raise Unsupported(f"attention_dropout {dropout} while training: model.eval()")
    inputs = (query, key.ckv, key.k_pe, module.kv_b_proj.weight)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise Unsupported("gradients: call the model under torch.no_grad()")
    if kwargs.get("output_attentions"):
        raise Unsupported("output_attentions: weights are never written")
    return key.rows.attend(module, key.layer, query, (key.ckv, key.k_pe), attention_mask), None
