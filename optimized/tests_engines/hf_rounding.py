"""How far the logits of two correct computations may be apart: the budget, derived.

Every operation rounds its result: ``fl(x) = x (1 + d)`` with ``|d| <= u``, where u is 2^-24, 2^-11
and 2^-8 for float32, float16 and bfloat16. A sum of products in float32, of data with mean 0 as
random weights produce it, has an additional error of up to ``2^-24 sum |a_i b_i|``, for any length
(Higham and Mary, "Sharper probabilistic backward error analysis", 2020, with constant 1).

The library's own model therefore runs in float64, with the same weights, and the result of each
operation is moved by exactly these amounts in random directions. The logits then move as far as
rounding can move them, through all layers. This runs with the library's attention, over per-head
keys and values, and with attention over latents (S-21), which rounds other numbers. Each of the two
may be wrong by its own movement, so two correct outputs may differ by the sum of both. The
directions are random, and the amounts are the largest possible ones. Real errors are distributed
over ``[-u, u]`` and are smaller by the square root of 3.
"""

from __future__ import annotations

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

DRAWS = 3
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
PRODUCTS = {"mm", "bmm", "addmm"}
ROUNDING = PRODUCTS | {
    *("add", "sub", "mul", "div", "pow", "rsqrt", "mean", "sum", "index_add_"),
    *("silu", "sigmoid", "_softmax", "cos", "sin", "_to_copy"),
}


class Rounded(TorchDispatchMode):
    """Move every result by the largest error of rounding to `dtype`."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.unit, self.seed = UNIT[dtype], seed
        self.generator: torch.Generator | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in ROUNDING or out.dtype not in {torch.float64, torch.float32}:
            return out
        # What the library computes in float32 in any model, as its norms, it rounds to float32.
        unit = self.unit if out.dtype is torch.float64 else UNIT[torch.float32]
        moved = out.abs() * unit
        if name in PRODUCTS:
            a, b = args[-2:]
            moved += UNIT[torch.float32] * (a.abs() @ b.abs())
        moved *= self._signs(moved)
        return out.add_(moved) if name.endswith("_") else out + moved

    def _signs(self, like: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            self.generator = torch.Generator(like.device).manual_seed(self.seed)
        shape, device = like.shape, like.device
        return 2.0 * torch.randint(0, 2, shape, generator=self.generator, device=device) - 1.0


def over_latents(module, query, key, value, attention_mask, scaling, **_rest):
    """Attend in the absorbed form to latents [B, 1, T, R] and [B, 1, T, P], in plain torch."""
    heads, width = module.num_heads, module.kv_lora_rank
    weights = module.kv_b_proj.weight.view(heads, -1, width)
    nope = module.qk_nope_head_dim
    absorbed = query[..., :nope] @ weights[:, :nope]
    scores = (absorbed @ key.mT + query[..., nope:] @ value.mT) * scaling
    latents = (scores + attention_mask).softmax(-1) @ key
    return (latents @ weights[:, nope:].mT).transpose(1, 2), None


AttentionInterface.register("eager_over_latents", over_latents)


class Oracle:
    """The library's eager logits of whole requests, and how far rounding can move them."""

    def __init__(self, model) -> None:
        self.model, self.dtype = model, model.dtype
        self.exact = copy.deepcopy(model).double()
        self.latent = copy.deepcopy(self.exact)
        for layer in self.latent.model.layers:
            # For the attention alone: the mask that it adds is made by another config, for "eager".
            attention = layer.self_attn
            attention.expand_kv = lambda ckv, k_pe: (ckv, k_pe)
            attention.config = copy.copy(attention.config)
            attention.config._attn_implementation = "eager_over_latents"

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the library's logits for a request alone, in one forward, without a cache."""
        return _run(self.model, tokens)

    @torch.no_grad()
    def budget(self, tokens: list[int]) -> float:
        """Return the largest difference of two correct outputs."""
        exact = _run(self.exact, tokens)
        moved = [0.0, 0.0]
        for form, model in enumerate((self.exact, self.latent)):
            for seed in range(DRAWS):
                with Rounded(self.dtype, seed):
                    logits = _run(model, tokens)
                moved[form] = max(moved[form], (logits - exact).abs().max().item())
        return sum(moved)


def _run(model, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens], device=model.device)
    return model(ids, use_cache=False).logits[0]
