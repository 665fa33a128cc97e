"""Cache formats as declared data: what one cached token is, byte by byte (rule S-11).

Everything that allocates, transfers or sizes a cache derives it from here, so a
format that keeps scales beside the cache can never be sized as one that does not.
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
    """Whatever names the two widths of a cached token as model dims do."""

    @property
    def kv_lora_rank(self) -> int:
        """R."""

    @property
    def qk_rope_head_dim(self) -> int:
        """P."""


class ScaleTensor(StrEnum):
    """Scales kept outside the token rows, in ``SCALE_DTYPE``."""

    NONE = "none"
    SCALAR = "scalar"  # one for the layer
    PER_TOKEN = "per_token"  # [num_blocks, 1, block_size]
    PER_GROUP = "per_group"  # [num_blocks, 1, 4]: one per block_size / 4 tokens


@dataclass(frozen=True)
class Field:
    """One run of equal elements inside a token's row."""

    name: str
    dtype: str
    offset: int  # bytes from the start of the row
    count: int  # elements

    @property
    def nbytes(self) -> int:
        """Bytes the run occupies."""
        return self.count * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class CacheFormat:
    """A cache format: element types of a row, and where its scales live.

    Parameters
    ----------
    name : str
        The name users select it by.
    ckv_dtype, k_pe_dtype : str
        Element types of the latent and of the rotated key.
    inline_scales : int
        Scales in ``SCALE_DTYPE`` stored in the row, each of an equal share of the latent.
    scale_tensor : ScaleTensor
        Scales kept beside the cache.
    """

    name: str
    ckv_dtype: str
    k_pe_dtype: str
    inline_scales: int = 0
    scale_tensor: ScaleTensor = ScaleTensor.NONE

    def fields(self, widths: Widths) -> tuple[Field, ...]:
        """Return the runs of a row in storage order: ``ckv``, ``ckv_scale`` if inline, ``k_pe``."""
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
        """Return the bytes of one cached token inside the cache tensor."""
        return sum(field.nbytes for field in self.fields(widths))

    def row(self, widths: Widths) -> tuple[str, int]:
        """Return a row as a cache tensor has it: element type and count; mixed rows are bytes."""
        fields = self.fields(widths)
        if len({field.dtype for field in fields}) > 1:
            return "uint8", self.token_bytes(widths)
        return self.ckv_dtype, sum(field.count for field in fields)

    def block_bytes(self, widths: Widths, block_size: int) -> int:
        """Return the bytes one block needs in all: its tokens and its share of the scale tensor."""
        return block_size * self.token_bytes(widths) + self.scale_bytes(block_size)

    def scale_bytes(self, block_size: int) -> int:
        """Return the bytes of one block's share of the scale tensor."""
        return self.scales_per_block(block_size) * numpy_dtype(SCALE_DTYPE).itemsize

    def scale_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...] | None:
        """Return the shape of the scale tensor, ``None`` when there is none."""
        if self.scale_tensor is ScaleTensor.NONE:
            return None
        if self.scale_tensor is ScaleTensor.SCALAR:
            return ()
        return (num_blocks, 1, self.scales_per_block(block_size))

    def scales_per_block(self, block_size: int) -> int:
        """Return G, the scales that belong to one block; 0 where none does."""
        if self.scale_tensor is ScaleTensor.PER_TOKEN:
            return block_size
        return GROUPS_PER_BLOCK if self.scale_tensor is ScaleTensor.PER_GROUP else 0

    @property
    def block_size_multiple(self) -> int:
        """What block sizes are multiples of: the groups of a block are equal."""
        return GROUPS_PER_BLOCK if self.scale_tensor is ScaleTensor.PER_GROUP else 1

    @property
    def couples_tokens(self) -> bool:
        """True when what a token reads as depends on tokens that were cached before it."""
        return self.scale_tensor is ScaleTensor.PER_GROUP

    @property
    def has_own_scales(self) -> bool:
        """Whether tokens, or parts of a latent, have scales of their own."""
        return not (self.is_plain or self.scale_tensor is ScaleTensor.SCALAR)

    @property
    def is_plain(self) -> bool:
        """True when a row is R + P elements of one type with no scale anywhere."""
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
    """Refuse a name that is not in ``FORMATS``; ``None`` stands for some plain one.

    Raises
    ------
    InvalidArgument
    """
    if cache_format is not None and cache_format not in FORMATS:
        raise InvalidArgument("cache_format", repr(cache_format), f"one of {', '.join(FORMATS)}")


def format_of(dtype: str, cache_format: str | None) -> str:
    """Return `cache_format`, or the plain format of `dtype` where it is ``None``."""
    return cache_format or PLAIN_FORMAT_OF_DTYPE[dtype]


def types_id(dtype: str, cache_format: str | None) -> str:
    """Return how ids spell an element type and a cache format: "bf16", "bf16-fp8_ds_mla"."""
    return "-".join([SHORT_NAMES[dtype], *filter(None, [cache_format])])
