"""What prefill in materialized heads needs to know of a layer and of its largest step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_mla_optimized.config.arguments import (
    check_at_least,
    check_between,
    take_flag,
    take_integers,
    take_scale,
)
from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.config.limits import MAX_HEADS, MAX_ROWS, MAX_TOKENS, largest_power_of_two
from paged_mla_shared.errors import InvalidArgument, Unsupported

_SMALLEST_DIM, _LARGEST_DIM = 16, 256


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """One layer's heads on one rank, and the largest step they will see.

    Parameters
    ----------
    num_heads : int
        H, heads on this rank; 1 to 128.
    softmax_scale : float
        Multiplies the logits; finite and > 0. The model's value (S-5).
    max_rows, max_tokens : int
        Largest B of any step, 1 to 32766, and largest T, 1 to 2^23
        (:mod:`~paged_mla_optimized.config.limits`). Keys have no limit.
    qk_nope_head_dim : int
        16 to 256: a power of two, or the sum of two powers of two, each at least 16.
    qk_rope_head_dim, v_head_dim : int
        Powers of two in 16..64 and 16..256.
    dtype : torch.dtype
        Of queries, keys, values and outputs: bfloat16, float16 or float32.
    causal : bool
        Query i of a row sees keys up to ``i + key_len - query_len`` (S-4), else all of the row.
    writes_empty : bool
        Rows without keys, and padded tokens, are answered with (0, -inf) (S-6). Else they are left
        as they are and cost nothing, which is what chunks of context want that are merged. A row
        whose keys go past the tensors of keys is answered with (0, -inf) either way: the plan does
        not see these tensors. One whose keys go past 2^30 counts as a row without keys.

    Raises
    ------
    InvalidArgument
        A value no implementation could accept.
    Unsupported
        Head sizes or dtypes these kernels do not know.
    """

    num_heads: int
    softmax_scale: float
    max_rows: int
    max_tokens: int
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    writes_empty: bool = True

    def __post_init__(self) -> None:
        dims = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        take_integers(self, "num_heads", "max_rows", "max_tokens", *dims)
        check_between(1, MAX_HEADS, num_heads=self.num_heads)
        check_between(1, MAX_ROWS, max_rows=self.max_rows)
        check_between(1, MAX_TOKENS, max_tokens=self.max_tokens)
        check_at_least(1, qk_nope_head_dim=self.qk_nope_head_dim, v_head_dim=self.v_head_dim)
        take_scale(self, "softmax_scale")
        take_flag(self, "causal")
        take_flag(self, "writes_empty")
        if self.qk_rope_head_dim < 1 or self.qk_rope_head_dim % 2:
            raise InvalidArgument("qk_rope_head_dim", self.qk_rope_head_dim, "even and > 0")
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPE_NAMES:
            raise Unsupported(f"dtype {self.dtype!r}: {', '.join(map(str, DTYPE_NAMES))}")
        for name, largest in (("qk_rope_head_dim", 64), ("v_head_dim", _LARGEST_DIM)):
            value = getattr(self, name)
            if not _is_dim(value, largest):
                raise Unsupported(f"{name} {value}: powers of two from 16 to {largest}")
        nope = self.qk_nope_head_dim
        rest = nope - largest_power_of_two(nope)
        if nope > _LARGEST_DIM or nope < _SMALLEST_DIM or (rest and not _is_dim(rest, nope)):
            raise Unsupported(
                f"qk_nope_head_dim {nope}: {_SMALLEST_DIM} to {_LARGEST_DIM}, a power of two or "
                f"the sum of two powers of two, each at least {_SMALLEST_DIM}"
            )

    @property
    def head_dims(self) -> tuple[int, int, int]:
        """Sizes of a key without and with position, and of a value."""
        return self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim


def _is_dim(value: int, largest: int) -> bool:
    return value & (value - 1) == 0 and _SMALLEST_DIM <= value <= largest
