"""The memory layout of a cached token, which the kernels of all operations read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_mla_optimized.config.attention import MlaConfig


@dataclass(frozen=True)
class CacheLayout:
    """The sizes of one cached token and of its scales.

    Parameters
    ----------
    ckv_words, k_pe_words : int
        Words of 16 bits of a cached token: of its latent, and of its rotated key. In formats with
        inline scales, the scales are stored between the two.
    row_bytes : int
        Bytes of a cached token, with its inline scales.
    scale_groups : int
        Groups of latent columns that have separate scales, >= 1. Only formats with inline scales
        have more than one.
    scale_bytes : int
        Bytes of the scale that a key tile loads for each key from a separate tensor: 0 or 4.
    """

    ckv_words: int
    k_pe_words: int
    row_bytes: int
    scale_groups: int
    scale_bytes: int

    @classmethod
    def of(cls, config: MlaConfig) -> CacheLayout:
        """Return the layout of a config's cache."""
        stored = config.stored
        nbytes = {field.name: field.nbytes for field in stored.fields(config)}
        return cls(
            ckv_words=nbytes["ckv"] // 2,
            k_pe_words=nbytes["k_pe"] // 2,
            row_bytes=stored.token_bytes(config),
            scale_groups=stored.inline_scales or 1,
            scale_bytes=4 if config.scales.startswith("per_") else 0,
        )
