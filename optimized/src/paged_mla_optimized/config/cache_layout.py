"""How a cached token lies in memory: what the kernels of all operations read of a format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_mla_optimized.config.attention import MlaConfig


@dataclass(frozen=True)
class CacheLayout:
    """The rows and scales of a config's cache.

    Parameters
    ----------
    ckv_words, k_pe_words : int
        Words of 16 bits of a row: of its latent, and of its rotated key. The scales of a row whose
        format has some lie between the two.
    row_bytes : int
        Bytes of a row.
    scale_groups : int
        Groups of latent columns with scales of their own, >= 1; more than one where scales lie in
        the row.
    scale_bytes : int
        Bytes of scales that a key tile has beside each row, 0 or 4.
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
