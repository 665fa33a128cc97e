"""Cache formats, declared as data: the bytes of a cached token (rule S-11).

All code that allocates, transfers or sizes a cache uses these declarations, so that separate scale
tensors are never forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from paged_mla_shared.dtypes import SHORT_NAMES, numpy_dtype
from paged_mla_shared.errors import InvalidArgument

SCALE_DTYPE = "float32"
GROUPS_PER_BLOCK = 4


class Widths(Protocol):
    """An object that has the two widths of a cached token, such as model dims."""

    @property
    def kv_lora_rank(self) -> int:
        """The width of the latent, R."""

    @property
    def qk_rope_head_dim(self) -> int:
        """The width of the rotated key, P."""


class ScaleTensor(StrEnum):
    """The scales that are stored outside the token rows, in ``SCALE_DTYPE``."""

    NONE = "none"
    SCALAR = "scalar"  # one scale for the layer
    PER_TOKEN = "per_token"  # [num_blocks, 1, block_size]
    PER_GROUP = "per_group"  # [num_blocks, 1, 4]: one scale per block_size / 4 tokens


@dataclass(frozen=True)
class Field:
    """A run of elements of one type inside a token's row."""

    name: str
    dtype: str
    offset: int  # bytes from the start of the row
    count: int  # elements

    @property
    def nbytes(self) -> int:
        """The number of bytes of the run."""
        return self.count * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class CacheFormat:
    """A cache format: the element types of a row, and the places of its scales.

    Parameters
    ----------
    name : str
        The name by which users select it.
    ckv_dtype, k_pe_dtype : str
        The element types of the latent and of the rotated key.
    inline_scales : int
        The number of scales in ``SCALE_DTYPE`` in the row, each for an equal part of the latent.
    scale_tensor : ScaleTensor
        The scales that are stored in a separate tensor.
    """

    name: str
    ckv_dtype: str
    k_pe_dtype: str
    inline_scales: int = 0
    scale_tensor: ScaleTensor = ScaleTensor.NONE

    def fields(self, widths: Widths) -> tuple[Field, ...]:
        """Return the runs of a row in order: ``ckv``, ``ckv_scale`` if inline, ``k_pe``."""
        parts = [("ckv", self.ckv_dtype, widths.kv_lora_rank)]
        if self.inline_scales:
            parts.append(("ckv_scale", SCALE_DTYPE, self.inline_scales))
        parts.append(("k_pe", self.k_pe_dtype, widths.qk_rope_head_dim))
        fields: list[Field] = []
        offset = 0
        for name, dtype, count in parts:
            fields.append(Field(name, dtype, offset, count))
            offset += fields[-1].nbytes
        return tuple(fields)

    def token_bytes(self, widths: Widths) -> int:
        """Return the number of bytes of one cached token in the cache tensor."""
        return sum(field.nbytes for field in self.fields(widths))

    def row(self, widths: Widths) -> tuple[str, int]:
        """Return a row's element type and count; a row of several types consists of bytes."""
        fields = self.fields(widths)
        if len({field.dtype for field in fields}) > 1:
            return "uint8", self.token_bytes(widths)
        return self.ckv_dtype, sum(field.count for field in fields)

    def block_bytes(self, widths: Widths, block_size: int) -> int:
        """Return the number of bytes of one block: its tokens and its separate scales."""
        return block_size * self.token_bytes(widths) + self.scale_bytes(block_size)

    def scale_bytes(self, block_size: int) -> int:
        """Return the number of bytes of one block's scales in the scale tensor."""
        return self.scales_per_block(block_size) * numpy_dtype(SCALE_DTYPE).itemsize

    def scale_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...] | None:
        """Return the shape of the scale tensor; ``None`` if the format has no scale tensor."""
        if self.scale_tensor is ScaleTensor.NONE:
            return None
        if self.scale_tensor is ScaleTensor.SCALAR:
            return ()
        return (num_blocks, 1, self.scales_per_block(block_size))

    def scales_per_block(self, block_size: int) -> int:
        """Return G, the number of separate scales of one block; 0 if blocks have none."""
        if self.scale_tensor is ScaleTensor.PER_TOKEN:
            return block_size
        return GROUPS_PER_BLOCK if self.scale_tensor is ScaleTensor.PER_GROUP else 0

    @property
    def block_size_multiple(self) -> int:
        """The number of which block sizes are multiples, so that scale groups have equal sizes."""
        return GROUPS_PER_BLOCK if self.scale_tensor is ScaleTensor.PER_GROUP else 1

    @property
    def couples_tokens(self) -> bool:
        """Whether the bytes and the value of a cached token depend on other tokens of its block."""
        return self.scale_tensor is ScaleTensor.PER_GROUP

    @property
    def has_own_scales(self) -> bool:
        """Whether tokens, groups of tokens, or parts of a latent have separate scales."""
        return not (self.is_plain or self.scale_tensor is ScaleTensor.SCALAR)

    @property
    def is_plain(self) -> bool:
        """Whether a row is R + P elements of one type, without any scale."""
        return (
            self.ckv_dtype == self.k_pe_dtype
            and not self.inline_scales
            and self.scale_tensor is ScaleTensor.NONE
        )


_E4M3 = "float8_e4m3"

FORMATS = {
    f.name: f
    for f in (
        CacheFormat("bf16", "bfloat16", "bfloat16"),
        CacheFormat("fp16", "float16", "float16"),
        CacheFormat("fp32", "float32", "float32"),
        CacheFormat("fp8_e4m3", _E4M3, _E4M3, scale_tensor=ScaleTensor.SCALAR),
        CacheFormat("fp8_ds_mla", _E4M3, "bfloat16", inline_scales=4),
        CacheFormat("fp8_block_token", _E4M3, _E4M3, scale_tensor=ScaleTensor.PER_TOKEN),
        CacheFormat("fp8_block_group", _E4M3, _E4M3, scale_tensor=ScaleTensor.PER_GROUP),
    )
}

PLAIN_FORMAT_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def check_format(cache_format: str | None) -> None:
    """Check that a name is in ``FORMATS``, or is ``None``, which means a plain format.

    Raises
    ------
    InvalidArgument
        There is no such format.
    """
    if cache_format is not None and cache_format not in FORMATS:
        raise InvalidArgument("cache_format", repr(cache_format), f"one of {', '.join(FORMATS)}")


def format_of(dtype: str, cache_format: str | None) -> str:
    """Return `cache_format`, or the plain format of `dtype` if it is ``None``."""
    return cache_format or PLAIN_FORMAT_OF_DTYPE[dtype]


def types_id(dtype: str, cache_format: str | None) -> str:
    """Return an element type and a cache format as in ids: "bf16", "bf16-fp8_ds_mla"."""
    return "-".join([SHORT_NAMES[dtype], *filter(None, [cache_format])])
