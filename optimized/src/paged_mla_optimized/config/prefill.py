"""The configuration of a :class:`~paged_mla_optimized.api.prefill.Prefill`."""

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
    """One layer's heads on one rank, and the sizes of its largest step.

    Parameters
    ----------
    num_heads : int
        H, heads on this rank; 1 to 128.
    softmax_scale : float
        Factor of the scores; finite and > 0. Use the model's value (S-5).
    max_rows, max_tokens : int
        The largest B of any step, 1 to 32766, and the largest T, 1 to 2^23
        (:mod:`~paged_mla_optimized.config.limits`). The number of keys has no limit.
    qk_nope_head_dim : int
        16 to 256: a power of two, or the sum of two powers of two, each at least 16.
    qk_rope_head_dim, v_head_dim : int
        Powers of two in 16..64 and 16..256.
    dtype : torch.dtype
        The dtype of queries, keys, values and outputs: bfloat16, float16 or float32.
    causal : bool
        Whether query i of a row sees only the keys up to ``i + key_len - query_len`` (S-4). Without
        it, each query sees all keys of its row.
    writes_empty : bool
        Whether the output of rows without keys, and of padded tokens, is written as (0, -inf)
        (S-6). Without it, these outputs stay unchanged and cost no time, as merges of context
        chunks require. The output of a row whose keys go past the key tensors is always (0, -inf),
        because the plan does not read the key tensors. A row whose keys go past 2^30 counts as a
        row without keys.

    Raises
    ------
    InvalidArgument
        A value is outside its legal range.
    Unsupported
        The kernels do not support the head sizes or the dtype.
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
            raise Unsupported(
                f"dtype={self.dtype!r} is not supported; use {', '.join(map(str, DTYPE_NAMES))}"
            )
        for name, largest in (("qk_rope_head_dim", 64), ("v_head_dim", _LARGEST_DIM)):
            value = getattr(self, name)
            if not _is_dim(value, largest):
                raise Unsupported(
                    f"{name}={value} is not supported; use a power of two from 16 to {largest}"
                )
        nope = self.qk_nope_head_dim
        rest = nope - largest_power_of_two(nope)
        if nope > _LARGEST_DIM or nope < _SMALLEST_DIM or (rest and not _is_dim(rest, nope)):
            raise Unsupported(
                f"qk_nope_head_dim={nope} is not supported; use {_SMALLEST_DIM} to {_LARGEST_DIM}, "
                f"a power of two or the sum of two powers of two, each at least {_SMALLEST_DIM}"
            )

    @property
    def head_dims(self) -> tuple[int, int, int]:
        """Sizes of a key without and with position, and of a value: (N, P, V)."""
        return self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim


def _is_dim(value: int, largest: int) -> bool:
    return value & (value - 1) == 0 and _SMALLEST_DIM <= value <= largest
