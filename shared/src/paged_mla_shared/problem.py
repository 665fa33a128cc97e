"""The static problem, one step of it, and its output."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paged_mla_shared.dims import MlaDims
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheLayout


class Mask(StrEnum):
    """The rule by which a query sees keys (S-4)."""

    CAUSAL = "causal"
    NON_CAUSAL = "non_causal"
    TREE = "tree"


class MaskSpelling(StrEnum):
    """The memory layout of a tree mask (rule S-14).

    QLEN
        bool, flat: the ``[query_len, query_len]`` matrices of all rows, row-major, one
        after the other. The context has no elements.
    FULL
        bool, flat: the ``[query_len, seq_len]`` matrices of all rows. The context
        columns are true (SGLang ``TreeMaskMode.FULL_MASK``).
    PACKED
        uint8 ``[T, W]``: bit ``j % 8`` of byte ``j // 8`` of line t is 1 if query t
        sees draft node j of its row; ``8 * W >= max_draft_tokens``.
    """

    QLEN = "qlen"
    FULL = "full"
    PACKED = "packed"


class RopePairing(StrEnum):
    """The two elements that a rotation combines (rule S-12)."""

    INTERLEAVED = "interleaved"  # (2i, 2i + 1): DeepSeek main attention, GPT-J
    NEOX = "neox"  # (i, i + P / 2): halves


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv:2309.00071); names as in DeepSeek's ``rope_scaling``.

    :func:`~paged_mla_shared.rope.legal_rope` documents the legal range of each number.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding that the step applies to ``q_pe`` and ``k_pe`` (rule S-12).

    :func:`~paged_mla_shared.rope.legal_rope` documents the legal range of each number.
    """

    pairing: RopePairing
    theta: float = 10000.0
    yarn: Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The values that stay fixed during the life of a runner.

    Parameters
    ----------
    dims : MlaDims
    dtype : str
        The element type of ``q_nope``, ``q_pe``, ``ckv``, ``k_pe`` and ``out``.
    cache_format : str
        A key of :data:`paged_mla_shared.formats.FORMATS`.
    cache_scale : float
        The layer's scale, a finite float32 > 0. Formats without a layer scale ignore it (S-11),
        because a layer can have a scale with any cache format.
    block_size : int
        The number of tokens of a cache block, >= 1.
    num_blocks : int
        The number of blocks of the cache, >= 1.
    max_rows, max_query_tokens, max_model_len : int
        Capacities: the largest B, T and ``seq_len`` (in tokens) of any step.
    softmax_scale : float
        The factor of the scores, finite and > 0. A model's value is ``(N + P) ** -0.5``
        times the squared YaRN mscale, never ``(R + P) ** -0.5`` (S-5).
    mask : Mask
    mask_spelling : MaskSpelling
        It is only used if `mask` is ``TREE``.
    max_draft_tokens : int
        The largest ``query_len`` of a tree row; 0 unless `mask` is ``TREE``.
    rope : Rope or None
        If it is not ``None``, ``q_pe`` and ``k_pe`` of a batch are not rotated, and the step
        rotates both by the positions of rule S-3. The cache always contains rotated keys.
    token_padding, block_padding : int
        The numbers of unused bytes after each token row and, in addition, after each block;
        multiples of the storage element. They describe caches that are views of a larger pool.
    """

    dims: MlaDims
    dtype: str
    cache_format: str
    block_size: int
    num_blocks: int
    max_rows: int
    max_query_tokens: int
    max_model_len: int
    softmax_scale: float
    mask: Mask = Mask.CAUSAL
    mask_spelling: MaskSpelling = MaskSpelling.QLEN
    max_draft_tokens: int = 0
    rope: Rope | None = None
    token_padding: int = 0
    block_padding: int = 0
    cache_scale: float = 1.0

    @property
    def layout(self) -> CacheLayout:
        """The byte addresses of the cache."""
        return CacheLayout(
            format=FORMATS[self.cache_format],
            dims=self.dims,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            token_padding=self.token_padding,
            block_padding=self.block_padding,
            scale=self.cache_scale,
        )


def cu_seqlens_of(lens: ArrayLike) -> NDArray[np.int32]:
    """Return 0 and the prefix sums of lengths [B], the starts of rows, int32 [B + 1]."""
    return np.append(0, np.cumsum(lens)).astype(np.int32)


class Rows(Protocol):
    """Ragged rows of queries, over cached or materialized keys; see :class:`Batch`."""

    @property
    def cu_seqlens_q(self) -> NDArray[np.int32]:
        """Prefix sums of query lengths, int32 [B + 1]."""

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """The number of keys of each row, int32 [B]."""

    @property
    def num_rows(self) -> int:
        """The number of rows, B."""

    @property
    def num_tokens(self) -> int:
        """The number of queries, T, including padded queries."""

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """The number of queries of each row, int32 [B]."""

    @property
    def query_width(self) -> int:
        """The number of elements of a query; a score sums as many products."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step. Arrays may be non-contiguous views; implementations must use their strides.

    Parameters
    ----------
    cu_seqlens_q : int32 [B + 1]
        Prefix sums of the rows' query lengths, starting at 0; the last entry is at most T.
        Tokens from ``cu_seqlens_q[-1]`` on are padding.
    seq_lens : int32 [B]
        The number of tokens of each row, **including** this step's; 0 for a padded row. It can
        be less than the row's query length only if the mask is non-causal (S-2).
    block_table : int32 [B, M]
        Block ids; entries from ``ceil(seq_len / block_size)`` on may contain anything (S-9).
    q_nope : dtype [T, H, R]
        Absorbed queries.
    q_pe : dtype [T, H, P]
        The rotated part of the queries.
    ckv : dtype [T, R]
        This step's latents, which are appended before attention.
    k_pe : dtype [T, P]
        This step's rotated keys.
    mask : bool [..] or uint8 [T, W], or None
        The draft trees in the problem's ``mask_spelling``; ``None`` unless the mask is ``TREE``.
    slot_mapping : int64 [T] or None
        The slots that ``append`` writes; -1 for tokens that are not written. ``None`` means the
        slots of rules S-1 and S-3.
    """

    cu_seqlens_q: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    block_table: NDArray[np.int32]
    q_nope: NDArray[Any]
    q_pe: NDArray[Any]
    ckv: NDArray[Any]
    k_pe: NDArray[Any]
    mask: NDArray[Any] | None = None
    slot_mapping: NDArray[np.int64] | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows, B."""
        return int(self.seq_lens.shape[0])

    @property
    def num_tokens(self) -> int:
        """The number of query tokens, T, including padded tokens."""
        return int(self.q_nope.shape[0])

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """The number of query tokens of each row, int32 [B]."""
        return np.diff(self.cu_seqlens_q).astype(np.int32)

    @property
    def query_width(self) -> int:
        """The number of elements of a query, R + P."""
        return int(self.q_nope.shape[2] + self.q_pe.shape[2])


@dataclass(frozen=True)
class Metadata:
    """The positions and slots that a plan derives from lengths and tables.

    Parameters
    ----------
    positions : int64 [T]
        The positions of rule S-3; 0 for padding.
    slot_mapping : int64 [T]
        The slots of rule S-1; -1 for padding.
    """

    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True)
class Output:
    """The output of attention, or a partial result to be merged.

    Parameters
    ----------
    out : [T, H, R], or [T, H, V] of materialized attention
        In the problem's dtype for a whole output, in float32 for a partial result.
    lse : float32 [T, H]
        The natural logarithm of the sum of exponentials of the scaled scores (S-7).
    """

    out: NDArray[Any]
    lse: NDArray[np.float32]
