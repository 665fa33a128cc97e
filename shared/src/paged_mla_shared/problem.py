"""What is asked: the static problem, one step of it, and its answer."""

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
    """Which keys a query sees (rule S-4)."""

    CAUSAL = "causal"
    NON_CAUSAL = "non_causal"
    TREE = "tree"


class MaskSpelling(StrEnum):
    """How a tree mask is laid out in memory (rule S-14).

    QLEN
        bool, flat: for each row its ``[query_len, query_len]`` matrix, row-major,
        matrices one after the other. No bytes for the context.
    FULL
        bool, flat: for each row its ``[query_len, seq_len]`` matrix. The context
        columns are true (SGLang ``TreeMaskMode.FULL_MASK``).
    PACKED
        uint8 ``[T, W]``: bit ``j % 8`` of byte ``j // 8`` of line t says whether the
        query sees draft node j of its row; ``8 * W >= max_draft_tokens``.
    """

    QLEN = "qlen"
    FULL = "full"
    PACKED = "packed"


class RopePairing(StrEnum):
    """Which two elements a rotation mixes (rule S-12)."""

    INTERLEAVED = "interleaved"  # (2i, 2i + 1): DeepSeek main attention, GPT-J
    NEOX = "neox"  # (i, i + P / 2): halves


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (arXiv:2309.00071); names as in DeepSeek's ``rope_scaling``.

    The legal range of each number is that of :func:`~paged_mla_shared.rope.legal_rope`.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding applied to ``q_pe`` and ``k_pe`` inside the step (rule S-12).

    The legal range of each number is that of :func:`~paged_mla_shared.rope.legal_rope`.
    """

    pairing: RopePairing
    theta: float = 10000.0
    yarn: Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that stays fixed while a runner lives.

    Parameters
    ----------
    dims : MlaDims
    dtype : str
        Element type of ``q_nope``, ``q_pe``, ``ckv``, ``k_pe`` and ``out``.
    cache_format : str
        Key of :data:`paged_mla_shared.formats.FORMATS`.
    cache_scale : float
        The layer's one scale, a finite float32 > 0. Formats that keep none ignore it (S-11): a
        layer may carry one whatever its cache.
    block_size : int
        Tokens per cache block, >= 1.
    num_blocks : int
        Blocks of the cache, >= 1.
    max_rows, max_query_tokens, max_model_len : int
        Capacities: B and T of any step, and the longest ``seq_len`` (tokens).
    softmax_scale : float
        Multiplies the logits; finite and > 0. The model's value is
        ``(N + P) ** -0.5`` times the squared yarn mscale, never ``(R + P) ** -0.5`` (S-5).
    mask : Mask
    mask_spelling : MaskSpelling
        Only read when `mask` is ``TREE``.
    max_draft_tokens : int
        Longest ``query_len`` of a tree row; 0 unless `mask` is ``TREE``.
    rope : Rope or None
        When set, ``q_pe`` and ``k_pe`` of a batch arrive unrotated and the step rotates
        both at the positions of rule S-3; the cache always holds rotated keys.
    token_padding, block_padding : int
        Unused bytes after each token row and, on top, after each block. Multiples of
        the storage element. Models caches that are strided views of a larger pool.
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
        """Where each cached byte lies."""
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
    """Return 0 and the prefix sums of lengths [B], int32 [B + 1]: where each row begins."""
    return np.append(0, np.cumsum(lens)).astype(np.int32)


class Rows(Protocol):
    """Ragged rows, whatever their queries attend to; see :class:`Batch`."""

    @property
    def cu_seqlens_q(self) -> NDArray[np.int32]:
        """Prefix sums of query lengths, int32 [B + 1]."""

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Keys of each row, int32 [B]."""

    @property
    def num_rows(self) -> int:
        """B."""

    @property
    def num_tokens(self) -> int:
        """T, padded queries included."""

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """Queries of each row, int32 [B]."""

    @property
    def query_width(self) -> int:
        """Elements of a query, whose products with a key a score sums."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step. Arrays may be non-contiguous views; implementations take them by strides.

    Parameters
    ----------
    cu_seqlens_q : int32 [B + 1]
        Prefix sums of the rows' query lengths, starting at 0; its last entry is at most T.
        Tokens at or past ``cu_seqlens_q[-1]`` are padding.
    seq_lens : int32 [B]
        Tokens of each row **including** this step's; 0 marks a padded row. Less than the row's
        query length only where the mask is not causal (S-2).
    block_table : int32 [B, M]
        Block ids; entries past ``ceil(seq_len / block_size)`` may hold anything (S-9).
    q_nope : dtype [T, H, R]
        Absorbed queries.
    q_pe : dtype [T, H, P]
    ckv : dtype [T, R]
        This step's latents, appended before attention.
    k_pe : dtype [T, P]
    mask : bool [..] or uint8 [T, W], or None
        In the problem's spelling; ``None`` unless the problem's mask is ``TREE``.
    slot_mapping : int64 [T] or None
        Where ``append`` writes; ``None`` means the slots of rules S-1 and S-3. -1 skips.
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
        """B."""
        return int(self.seq_lens.shape[0])

    @property
    def num_tokens(self) -> int:
        """T, padded tokens included."""
        return int(self.q_nope.shape[0])

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """Query tokens of each row, int32 [B]."""
        return np.diff(self.cu_seqlens_q).astype(np.int32)

    @property
    def query_width(self) -> int:
        """R + P."""
        return int(self.q_nope.shape[2] + self.q_pe.shape[2])


@dataclass(frozen=True)
class Metadata:
    """What a plan derives from lengths and tables.

    Parameters
    ----------
    positions : int64 [T]
        Rule S-3; 0 for padding.
    slot_mapping : int64 [T]
        Rule S-1; -1 for padding.
    """

    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]


@dataclass(frozen=True)
class Output:
    """An answer, or a partial answer to be merged.

    Parameters
    ----------
    out : [T, H, R], or [T, H, V] of materialized attention
        In the problem's dtype for a whole answer, float32 for a partial.
    lse : float32 [T, H]
        Natural-log sum of exponentials of the scaled scores (S-7).
    """

    out: NDArray[Any]
    lse: NDArray[np.float32]
