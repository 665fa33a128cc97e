"""What stays fixed while a :class:`~paged_mla_optimized.api.paged_mla.PagedMla` lives."""

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
"""Models with fewer latents may have heads as wide as latents; none with so many has (S-5)."""
MASKS = ("causal", "non_causal", *(f"tree:{spelling}" for spelling in MaskSpelling))


class SoftmaxScaleWarning(UserWarning):
    """A config's ``softmax_scale`` is ``(R + P) ** -0.5``, which is no known model's (S-5)."""


@dataclass(frozen=True, kw_only=True)
class MlaConfig:
    """One MLA attention layer on one rank, its cache, and the largest step it will see.

    Parameters
    ----------
    num_heads : int
        H, query heads on this rank; 1 to 128.
    softmax_scale : float
        Multiplies the logits; finite and > 0. The model's value, ``(N + P) ** -0.5`` times the
        squared mscale of its yarn. ``(R + P) ** -0.5`` of 256 latents or more is a mistake, of
        which a :class:`SoftmaxScaleWarning` tells (S-5).
    block_size : int
        Tokens per cache block; 1 to 32768, and of "fp8_block_group" multiples of 4.
    max_rows, max_query_tokens, max_model_len : int
        Largest B of any step, 1 to 32766; largest T of any step, 1 to 2^23; and the longest
        ``seq_len`` in tokens, 1 to 2^30. :mod:`~paged_mla_optimized.config.limits` says why.
    kv_lora_rank : int
        R, a power of two in 16..512.
    qk_rope_head_dim : int
        P, a power of two in 16..64.
    dtype : torch.dtype
        Of queries, latents and outputs: bfloat16, float16 or float32.
    cache_format : str or None
        One of FP8 (S-11), or the plain one of `dtype`, "bf16", "fp16" or "fp32", for which
        ``None`` stands: the config then has its name.
    products : str
        Of queries and FP8 latents, weights and FP8 latents: "exact", of 16 bits, or "fast", which
        lets kernels round queries and weights to FP8. Not all kernels do.
    mask : str
        One of "causal", "non_causal", "tree:qlen", "tree:full", "tree:packed" (S-4, S-14).
    max_draft_tokens : int
        Longest ``query_len`` of a tree row, 1 to 1024; 0 unless `mask` is a tree.
    rope : Rope or None
        When set, ``q_pe`` and ``k_pe`` arrive unrotated and are rotated in the kernels (S-12). Its
        parameters have the ranges of :func:`~paged_mla_shared.rope.legal_rope`.
    batch_invariant : bool
        Work is cut by each row's own lengths, so that its bits do not depend on the rows beside
        it (S-20). Costs balance between long and short rows.
    lse_base : str
        "e" as everywhere in the rules (S-7), or "2" for engines that merge in base 2.
    reserved_slot : int or None
        A slot that ``append`` skips like a negative one, >= 0: SGLang keeps slot 0 for padding.
    table_multiple : int
        0: block tables are given to ``plan``. Else ``plan`` builds them from a
        :class:`~paged_mla_optimized.tensors.step.RequestMap`, as wide as the longest row needs,
        rounded up to a multiple of this many entries, at most 2^20.
    table_fill : int
        Stands in the entries of a built table past a row's last block; an int32.

    Raises
    ------
    InvalidArgument
        A value no implementation could accept.
    Unsupported
        Head sizes, dtypes or cache formats these kernels do not know.
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
    cache_format: str = field(default=None)  # type: ignore[assignment] # a name once it is made
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
        """Return the attention of a model, of whose config the transformers library makes one.

        Heads, widths, ``softmax_scale`` and ``rope`` are the model's, in the way of
        :func:`~paged_mla_optimized.config.huggingface.attention_of`. Queries and keys are then
        given as projections leave them, since the kernels rotate them; where the model rotates them
        itself, take ``dataclasses.replace(config, rope=None)``. Everything else is changed in the
        same way.

        Parameters
        ----------
        config : PretrainedConfig, or dict
            A model's, as releases 4 or 5 of transformers make it, or ``config.json``, loaded.
        block_size, max_rows, max_query_tokens : int
            As for the class.
        max_model_len : int or None
            ``None`` takes the model's ``max_position_embeddings``.
        tensor_parallel_size : int
            Ranks that the model's heads are divided over, a divisor of their number.
        dtype : torch.dtype or None
            ``None`` takes the model's, and bfloat16 if its config names none.

        Raises
        ------
        InvalidArgument
            A field of `config` is missing or wrong, or a capacity is.
        Unsupported
            Another attention than MLA, or a rotation or head sizes that these kernels do not know.
        """
        found = attention_of(config)
        ranks = integer("tensor_parallel_size", tensor_parallel_size)
        if ranks < 1 or found.dims.num_heads % ranks:
            allowed = f"a divisor of num_attention_heads = {found.dims.num_heads}"
            raise InvalidArgument("tensor_parallel_size", ranks, allowed)
        if dtype is None and found.dtype not in TORCH_DTYPES:
            allowed = f"{', '.join(TORCH_DTYPES)}; or another that dtype= says"
            raise InvalidArgument("config.dtype", found.dtype, allowed)
        if max_model_len is None:
            max_model_len, name = found.max_position_embeddings, "config.max_position_embeddings"
            if max_model_len is None:
                allowed = "an integer, or max_model_len= in its place"
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
        """What a cached token is."""
        return FORMATS[self.cache_format]

    @property
    def is_fp8(self) -> bool:
        """True when latents are cached as e4m3 and scales."""
        return self.stored.ckv_dtype == "float8_e4m3"

    @property
    def scales(self) -> str:
        """Where the scales of the cache lie: "inline", or a word of ``ScaleTensor``."""
        return "inline" if self.stored.inline_scales else str(self.stored.scale_tensor)

    @property
    def is_tree(self) -> bool:
        """True when the batch brings a mask."""
        return self.mask not in {Mask.CAUSAL, Mask.NON_CAUSAL}

    @property
    def lse_unit(self) -> float:
        """What a natural lse is multiplied by."""
        return 1 / math.log(2) if self.lse_base == "2" else 1.0

    @property
    def tree_words(self) -> int:
        """32-bit words of one packed line of the draft tree, 0 without one."""
        return -(-self.max_draft_tokens // 32)

    @property
    def table_width(self) -> int:
        """Entries of a row of the tables that ``plan`` builds; 0 if it builds none."""
        if self.table_multiple == 0:
            return 0
        blocks = -(-self.max_model_len // self.block_size)
        return -(-blocks // self.table_multiple) * self.table_multiple

    @property
    def rope_pairing(self) -> str:
        """What the kernels rotate: "none", "interleaved" or "neox"."""
        return "none" if self.rope is None else str(self.rope.pairing)

    @property
    def search_steps(self) -> int:
        """Steps of a binary search over ``max_rows`` rows."""
        return self.max_rows.bit_length()

    def _check_mask(self) -> None:
        check_word("mask", self.mask, MASKS)
        if self.is_tree and not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            allowed = f"1 to {MAX_DRAFT_TOKENS} with a tree"
            raise InvalidArgument("max_draft_tokens", self.max_draft_tokens, allowed)
        if not self.is_tree and self.max_draft_tokens != 0:
            raise InvalidArgument("max_draft_tokens", self.max_draft_tokens, "0 without a tree")

    def _check_dims(self) -> None:
        if self.qk_rope_head_dim < 1 or self.qk_rope_head_dim % 2:
            raise InvalidArgument("qk_rope_head_dim", self.qk_rope_head_dim, "even and > 0")
        if self.kv_lora_rank < 1:
            raise InvalidArgument("kv_lora_rank", self.kv_lora_rank, "> 0")
        limits = (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))
        for name, largest in limits:
            value = getattr(self, name)
            if value & (value - 1) or not 16 <= value <= largest:
                raise Unsupported(f"{name} {value}: powers of two from 16 to {largest}")

    def _check_format(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPE_NAMES:
            raise Unsupported(f"dtype {self.dtype!r}: {', '.join(map(str, DTYPE_NAMES))}")
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
            allowed = f"{plain} or None, which stands for it, with {self.dtype}"
            raise InvalidArgument("cache_format", self.cache_format, allowed)

    def _warn_of_scale(self) -> None:
        """Tell of a scale that belongs to the width of a cached token, not to that of a head."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        is_suspect = math.isclose(self.softmax_scale, width**-0.5, rel_tol=1e-6)
        if self.kv_lora_rank >= _LEAST_RANK_TO_WARN and is_suspect:
            given = f"softmax_scale {self.softmax_scale:.6g} is (kv_lora_rank + qk_rope_head_dim)"
            warnings.warn(
                f"{given} ** -0.5 = {width} ** -0.5. A model's scale is that of its heads before "
                "absorption, (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 (192 ** -0.5 in "
                "DeepSeek-V3) times the squared mscale of its yarn: MlaConfig.from_hf has it",
                SoftmaxScaleWarning,
                stacklevel=4,  # whoever makes the config
            )
