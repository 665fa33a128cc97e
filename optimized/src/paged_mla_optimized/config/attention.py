"""The configuration of a :class:`~paged_mla_optimized.api.paged_mla.PagedMla`."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from paged_mla_optimized.config.arguments import (
    check_between,
    check_int32,
    check_word,
    integer,
    take_flag,
    take_integers,
    take_scale,
)
from paged_mla_optimized.config.huggingface import attention_of
from paged_mla_optimized.config.limits import (
    MAX_BLOCK_SIZE,
    MAX_DRAFT_TOKENS,
    MAX_HEADS,
    MAX_MODEL_LEN,
    MAX_ROWS,
    MAX_TABLE_MULTIPLE,
    MAX_TOKENS,
)
from paged_mla_shared.backend import PRODUCTS
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE, CacheFormat
from paged_mla_shared.problem import Mask, MaskSpelling, Rope
from paged_mla_shared.rope import legal_rope

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_INTEGERS = (
    "num_heads",
    "block_size",
    "max_rows",
    "max_query_tokens",
    "max_model_len",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "max_draft_tokens",
    "table_multiple",
    "table_fill",
)
_LEAST_RANK_TO_WARN = 256
"""With this rank or a larger rank, ``R + P`` is the head size of no known model (S-5)."""
MASKS = ("causal", "non_causal", *(f"tree:{spelling}" for spelling in MaskSpelling))


class SoftmaxScaleWarning(UserWarning):
    """``softmax_scale`` equals ``(R + P) ** -0.5``, which is the scale of no known model (S-5)."""


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """One MLA attention layer on one rank, its cache format, and the sizes of its largest step.

    Parameters
    ----------
    num_heads : int
        H, query heads on this rank; 1 to 128.
    softmax_scale : float
        Factor of the scores; finite and > 0. Use the model's value, ``(N + P) ** -0.5`` times the
        squared mscale of its yarn. The value ``(R + P) ** -0.5`` with R of 256 or more is almost
        always a mistake and causes a :class:`SoftmaxScaleWarning` (S-5).
    block_size : int
        Keys per cache block, 1 to 32768; a multiple of 4 for "fp8_block_group".
    max_rows, max_query_tokens, max_model_len : int
        The largest B of any step, 1 to 32766; the largest T of any step, 1 to 2^23; and the longest
        ``seq_len`` in tokens, 1 to 2^30. :mod:`~paged_mla_optimized.config.limits` gives reasons.
    kv_lora_rank : int
        R, a power of two in 16..512.
    qk_rope_head_dim : int
        P, a power of two in 16..64.
    dtype : torch.dtype
        The dtype of queries, latents and outputs: bfloat16, float16 or float32.
    cache_format : str or None
        An FP8 format (S-11), or the plain format of `dtype`: "bf16", "fp16" or "fp32". ``None``
        selects the plain format; the attribute then has its name.
    products : str
        How kernels multiply queries and softmax weights with FP8 latents. "exact" uses 16-bit
        products. "fast" allows kernels to round queries and weights to FP8; only some kernels do.
    mask : str
        One of "causal", "non_causal", "tree:qlen", "tree:full", "tree:packed" (S-4, S-14).
    max_draft_tokens : int
        The longest ``query_len`` of a tree row, 1 to 1024; 0 unless `mask` is a tree.
    rope : Rope or None
        When set, ``q_pe`` and ``k_pe`` are passed unrotated and the kernels rotate them (S-12). Its
        parameters have the ranges of :func:`~paged_mla_shared.rope.legal_rope`.
    batch_invariant : bool
        Whether the work is split by each row's own lengths alone, so that the bits of a row do not
        depend on the other rows of its step (S-20). Long and short rows are then balanced less.
    lse_base : str
        The base of ``lse``: "e", as in all rules (S-7), or "2" for engines that merge in base 2.
    reserved_slot : int or None
        A slot >= 0 that ``append`` skips like a negative slot: SGLang reserves slot 0 for padding.
    table_multiple : int
        With 0, the caller passes block tables to ``plan``. Otherwise ``plan`` builds them from a
        :class:`~paged_mla_optimized.tensors.step.RequestMap`, as wide as a row of
        ``max_model_len`` tokens needs, rounded up to a multiple of this many entries; at most 2^20.
    table_fill : int
        The int32 value of the entries of a built table after a row's last block.

    Raises
    ------
    InvalidArgument
        A value is outside its legal range.
    Unsupported
        The kernels do not support the head sizes or the dtype.
    """

    num_heads: int
    softmax_scale: float
    block_size: int
    max_rows: int
    max_query_tokens: int
    max_model_len: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    cache_format: str = field(default=None)  # type: ignore[assignment] # a str after __post_init__
    products: str = "exact"
    mask: str = "causal"
    max_draft_tokens: int = 0
    rope: Rope | None = None
    batch_invariant: bool = False
    lse_base: str = "e"
    reserved_slot: int | None = None
    table_multiple: int = 0
    table_fill: int = -1

    def __post_init__(self) -> None:
        take_integers(self, *_INTEGERS)
        if self.reserved_slot is not None:
            take_integers(self, "reserved_slot")
        check_between(1, MAX_HEADS, num_heads=self.num_heads)
        check_between(1, MAX_BLOCK_SIZE, block_size=self.block_size)
        check_between(1, MAX_ROWS, max_rows=self.max_rows)
        check_between(1, MAX_TOKENS, max_query_tokens=self.max_query_tokens)
        check_between(1, MAX_MODEL_LEN, max_model_len=self.max_model_len)
        take_scale(self, "softmax_scale")
        check_word("products", self.products, PRODUCTS)
        check_word("lse_base", self.lse_base, ("e", "2"))
        take_flag(self, "batch_invariant")
        if self.reserved_slot is not None and not 0 <= self.reserved_slot < 2**63:
            raise InvalidArgument("reserved_slot", self.reserved_slot, "an int64 >= 0, or None")
        check_between(0, MAX_TABLE_MULTIPLE, table_multiple=self.table_multiple)
        check_int32("table_fill", self.table_fill)
        self._check_mask()
        self._check_format()
        self._check_dims()
        if self.rope is not None:
            object.__setattr__(self, "rope", legal_rope(self.rope))
        self._warn_of_scale()

    @classmethod
    def from_hf(
        cls,
        config: object,
        *,
        block_size: int,
        max_rows: int,
        max_query_tokens: int,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return the attention of a model from its config in the transformers library.

        Heads, widths, ``softmax_scale`` and ``rope`` are the model's, as
        :func:`~paged_mla_optimized.config.huggingface.attention_of` finds them. Since ``rope`` is
        set, pass queries and keys unrotated: the kernels rotate them. If the model rotates them
        itself, use ``dataclasses.replace(config, rope=None)``. Change any other field in the same
        way.

        Parameters
        ----------
        config : PretrainedConfig, or dict
            The config of a model from transformers 4 or 5, or its ``config.json`` as a dict.
        block_size, max_rows, max_query_tokens : int
            As for the class.
        max_model_len : int or None
            ``None`` uses the model's ``max_position_embeddings``.
        tensor_parallel_size : int
            The number of ranks that share the model's heads; a divisor of the number of heads.
        dtype : torch.dtype or None
            ``None`` uses the dtype of the model's config, or bfloat16 if the config has none.

        Raises
        ------
        InvalidArgument
            A field of `config` is missing or wrong, or a size is outside its legal range.
        Unsupported
            The attention is not dense MLA, or the kernels do not support its rope or head sizes.
        """
        found = attention_of(config)
        ranks = integer("tensor_parallel_size", tensor_parallel_size)
        if ranks < 1 or found.dims.num_heads % ranks:
            allowed = f"a divisor of num_attention_heads = {found.dims.num_heads}"
            raise InvalidArgument("tensor_parallel_size", ranks, allowed)
        if dtype is None and found.dtype not in TORCH_DTYPES:
            allowed = f"{', '.join(TORCH_DTYPES)}; or pass dtype="
            raise InvalidArgument("config.dtype", found.dtype, allowed)
        if max_model_len is None:
            max_model_len, name = found.max_position_embeddings, "config.max_position_embeddings"
            if max_model_len is None:
                allowed = "an integer; or pass max_model_len="
                raise InvalidArgument(name, None, allowed)
            check_between(1, MAX_MODEL_LEN, **{name: max_model_len})
        return cls(
            num_heads=found.dims.num_heads // ranks,
            softmax_scale=found.softmax_scale,
            block_size=block_size,
            max_rows=max_rows,
            max_query_tokens=max_query_tokens,
            max_model_len=max_model_len,
            kv_lora_rank=found.dims.kv_lora_rank,
            qk_rope_head_dim=found.dims.qk_rope_head_dim,
            dtype=TORCH_DTYPES[found.dtype] if dtype is None else dtype,
            rope=found.rope,
        )

    @property
    def stored(self) -> CacheFormat:
        """The format of a cached token."""
        return FORMATS[self.cache_format]

    @property
    def is_fp8(self) -> bool:
        """True if latents are cached as e4m3 codes with scales."""
        return self.stored.ckv_dtype == "float8_e4m3"

    @property
    def scales(self) -> str:
        """Where the cache stores its scales: "inline", or a word of ``ScaleTensor``."""
        return "inline" if self.stored.inline_scales else str(self.stored.scale_tensor)

    @property
    def is_tree(self) -> bool:
        """True if each step has a mask tensor for its draft trees."""
        return self.mask not in {Mask.CAUSAL, Mask.NON_CAUSAL}

    @property
    def lse_unit(self) -> float:
        """The factor that converts a natural lse to the config's base."""
        return 1 / math.log(2) if self.lse_base == "2" else 1.0

    @property
    def tree_words(self) -> int:
        """32-bit words of one line of a packed tree mask; 0 without a tree."""
        return -(-self.max_draft_tokens // 32)

    @property
    def table_width(self) -> int:
        """Entries of a row of the tables that ``plan`` builds; 0 if ``plan`` builds none."""
        if self.table_multiple == 0:
            return 0
        blocks = -(-self.max_model_len // self.block_size)
        return -(-blocks // self.table_multiple) * self.table_multiple

    @property
    def rope_pairing(self) -> str:
        """How the kernels pair elements to rotate them: "none", "interleaved" or "neox"."""
        return "none" if self.rope is None else str(self.rope.pairing)

    @property
    def search_steps(self) -> int:
        """Steps of a binary search over ``max_rows`` rows."""
        return self.max_rows.bit_length()

    def _check_mask(self) -> None:
        check_word("mask", self.mask, MASKS)
        if self.is_tree and not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            allowed = f"1 to {MAX_DRAFT_TOKENS} with a tree mask"
            raise InvalidArgument("max_draft_tokens", self.max_draft_tokens, allowed)
        if not self.is_tree and self.max_draft_tokens != 0:
            raise InvalidArgument(
                "max_draft_tokens", self.max_draft_tokens, "0 without a tree mask"
            )

    def _check_dims(self) -> None:
        if self.qk_rope_head_dim < 1 or self.qk_rope_head_dim % 2:
            raise InvalidArgument("qk_rope_head_dim", self.qk_rope_head_dim, "even and > 0")
        if self.kv_lora_rank < 1:
            raise InvalidArgument("kv_lora_rank", self.kv_lora_rank, "> 0")
        limits = (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))
        for name, largest in limits:
            value = getattr(self, name)
            if value & (value - 1) or not 16 <= value <= largest:
                raise Unsupported(
                    f"{name}={value} is not supported; use a power of two from 16 to {largest}"
                )

    def _check_format(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPE_NAMES:
            raise Unsupported(
                f"dtype={self.dtype!r} is not supported; use {', '.join(map(str, DTYPE_NAMES))}"
            )
        plain = PLAIN_FORMAT_OF_DTYPE[DTYPE_NAMES[self.dtype]]
        given: Any = self.cache_format
        if given is None:
            object.__setattr__(self, "cache_format", plain)
        check_word("cache_format", self.cache_format, FORMATS)
        multiple = self.stored.block_size_multiple
        if self.block_size % multiple:
            allowed = f"a multiple of {multiple} in {self.cache_format}"
            raise InvalidArgument("block_size", self.block_size, allowed)
        if not self.is_fp8 and self.cache_format != plain:
            allowed = f"{plain} (or None) with {self.dtype}, or an FP8 format"
            raise InvalidArgument("cache_format", self.cache_format, allowed)

    def _warn_of_scale(self) -> None:
        """Warn if the scale is that of the width of a cached token, not that of a head."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        is_suspect = math.isclose(self.softmax_scale, width**-0.5, rel_tol=1e-6)
        if self.kv_lora_rank >= _LEAST_RANK_TO_WARN and is_suspect:
            given = f"softmax_scale {self.softmax_scale:.6g} is (kv_lora_rank + qk_rope_head_dim)"
            warnings.warn(
                f"{given} ** -0.5 = {width} ** -0.5. Use the scale of the model's heads before "
                "absorption: (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 (192 ** -0.5 in "
                "DeepSeek-V3), times the squared mscale of its yarn. MlaConfig.from_hf computes it",
                SoftmaxScaleWarning,
                stacklevel=4,  # the caller of MlaConfig
            )
