"""The protocol between the conformance suite and an implementation under test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.errors import Unsupported
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.operation import operation, operations_of
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Mask, Metadata, Output, Problem

PRODUCTS = ("exact", "fast")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """The capabilities that a backend declares; it does not have to support anything else.

    Parameters
    ----------
    ops : frozenset of str
        Names of :data:`OPERATIONS`. :func:`ops_of` returns the operations of a class of runners.
    dtypes : frozenset of str
    cache_formats : frozenset of str
        Names of :data:`paged_mla_shared.formats.FORMATS`.
    block_sizes, num_heads : frozenset of int
    head_dims : frozenset of (R, P)
    masks : frozenset of str
        "causal", "non_causal", "tree:qlen", "tree:full", "tree:packed".
    ropes : frozenset of {"interleaved", "neox"}
    features : frozenset of str
        "mixed": rows of different query lengths in one batch; "padding": rows with
        ``seq_len`` 0 and tokens after ``cu_seqlens_q[-1]``; "replay": a second step on one
        runner; "strided_cache", "strided_inputs": non-contiguous arrays; "large_offsets":
        caches of more than 2^31 elements; "explicit_slots": ``Batch.slot_mapping``;
        "validation": bad input raises an error before anything is written; "batch_invariant":
        the bits of a row do not depend on the other rows of the batch (S-20); "bounded": for
        any values of a step, only bytes of its rows are read or written
        (:class:`BoundedBackend`).
    prefill_dims : frozenset of (N, P, V)
        The head dims of ``prefill`` and ``layer``.
    max_query_len : int
        The largest number of query tokens of a row.
    products : str
        One of :data:`PRODUCTS`. With ``fast``, queries and weights may be rounded to 8 bits
        before they are multiplied with an 8-bit cache, which has a wider budget.
    softmax_scale : float or None
        The fixed scale of a kernel that does not take one; ``None`` if it takes the problem's.
    """

    ops: frozenset[str] = field(default_factory=frozenset)
    dtypes: frozenset[str] = field(default_factory=frozenset)
    cache_formats: frozenset[str] = field(default_factory=frozenset)
    block_sizes: frozenset[int] = field(default_factory=frozenset)
    num_heads: frozenset[int] = field(default_factory=frozenset)
    head_dims: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    masks: frozenset[str] = field(default_factory=frozenset)
    ropes: frozenset[str] = field(default_factory=frozenset)
    features: frozenset[str] = field(default_factory=frozenset)
    prefill_dims: frozenset[tuple[int, int, int]] = field(default_factory=frozenset)
    max_query_len: int = 0
    products: str = "exact"
    softmax_scale: float | None = None

    def unmet(self, problem: Problem, ops: Sequence[str], features: Sequence[str]) -> list[str]:
        """Return the needs of `problem`, `ops` and `features` that are not declared, as phrases."""
        dims = problem.dims
        needs: list[tuple[str, Any, frozenset[Any]]] = [
            ("dtype", problem.dtype, self.dtypes),
            ("cache_format", problem.cache_format, self.cache_formats),
            ("block_size", problem.block_size, self.block_sizes),
            ("num_heads", dims.num_heads, self.num_heads),
            (
                "(kv_lora_rank, qk_rope_head_dim)",
                (dims.kv_lora_rank, dims.qk_rope_head_dim),
                self.head_dims,
            ),
            ("mask", mask_name(problem), self.masks),
        ]
        if problem.rope is not None:
            needs.append(("rope", str(problem.rope.pairing), self.ropes))
        needs += [("op", op, self.ops) for op in ops]
        if {"prefill", "layer"} & set(ops):
            head = (dims.qk_nope_head_dim, dims.qk_rope_head_dim, dims.v_head_dim)
            needs.append(("prefill of (N, P, V)", head, self.prefill_dims))
        needs += [("feature", feature, self.features) for feature in features]
        if self.softmax_scale is not None:
            needs.append(("softmax_scale", problem.softmax_scale, frozenset({self.softmax_scale})))
        return [f"{kind} {value} not declared" for kind, value, have in needs if value not in have]


def mask_name(problem: Problem) -> str:
    """Return the name of the problem's mask in :attr:`Capabilities.masks`."""
    if problem.mask is Mask.TREE:
        return f"{problem.mask}:{problem.mask_spelling}"
    return str(problem.mask)


class Runner(Protocol):
    """One prepared problem with its cache. Methods may be called in any order, with new batches.

    Arrays that the caller passes belong to the caller and are never written. Results are new
    arrays. If no rule allows a batch, the first method that takes it raises
    :class:`InvalidArgument`, and nothing is written.

    Axes: B rows of a step, T its query tokens, H heads, R and P of the problem's dims, N and V of
    a head before absorption, K cached tokens of all rows. *dtype* is the problem's dtype.
    """

    def load_cache(self, image: CacheImage) -> None:
        """Make the cache equal to `image`, including its poison.

        It is called before all other methods, and between steps.
        """

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the current raw bytes of blocks [n], uint8 [n, block_bytes].

        Each block's scales, if the format has any, follow its ``block_stride`` bytes.
        """

    @operation(Batch, Metadata, positions=1, slot_mapping=1)
    def plan(self, batch: Batch) -> Metadata:
        """Prepare `batch`, once per step; return positions and slots, int64 [T], exact (S-1, S-3).

        The position is 0 and the slot is -1 for padding, and for the first
        ``query_len - seq_len`` queries of a row with fewer keys than queries.
        """
        raise Unsupported(f"plan of {batch.num_rows} rows is not declared")

    @operation(Batch)
    def append(self, batch: Batch) -> None:
        """Write ``ckv`` and ``k_pe`` to the cache, and no other byte (S-10).

        It is called once per layer, before ``attend``. Keys are rotated if the problem has a rope.
        """
        raise Unsupported(f"append of {batch.num_tokens} tokens is not declared")

    @operation(Batch, Output, out=3, lse=2)
    def attend(self, batch: Batch) -> Output:
        """Compute attention over the current cache, once per layer (S-4 to S-7).

        ``out`` is dtype [T, H, R], and ``lse`` is float32 [T, H] in nats. They are 0 and -inf for
        queries without visible keys.
        """
        raise Unsupported(f"attend of {batch.num_tokens} tokens is not declared")

    @operation(Sequence, Output, out=3, lse=2)
    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partial results of the same queries into one float32 output (S-8).

        The arrays may be views; only the last stride of ``out`` is always 1. Where ``lse`` is
        -inf, ``out`` may contain anything, including NaN.
        """
        raise Unsupported(f"merge of {len(partials)} partials is not declared")

    @operation(Batch, tuple, ckv=2, k_pe=2, reads_rows=True)
    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the cached ``ckv`` [K, R] and ``k_pe`` [K, P] of all rows; K sums ``seq_lens``.

        They have the problem's dtype, are in row order, and are bit-exact. With 8-bit formats, each
        value is rounded to float32, then to dtype (S-1, S-9).
        """
        raise Unsupported(f"gather_context of {batch.num_rows} rows is not declared")

    @operation(Batch, tuple, codes=3, scales=2)
    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the rotated queries as e4m3 codes [T, H, R + P] with scales [T, H] (S-11).

        `scale`, a float32 > 0, is the scale of all queries. With ``None``, the scale of each token
        and head is computed from the data. Both results are exact; values of padding are arbitrary.
        """
        raise Unsupported(f"e4m3 of {batch.num_tokens} queries, scale {scale}, is not declared")

    @operation(PrefillBatch, Output, out=3, lse=2)
    def prefill(self, batch: PrefillBatch) -> Output:
        """Compute attention, causal or not, over keys and values of every head (S-21).

        It reads no cache.

        ``out`` is dtype [T, H, V], and ``lse`` is float32 [T, H] in nats. They are 0 and -inf for
        queries without visible keys.
        """
        raise Unsupported(f"prefill of {batch.num_rows} rows is not declared")

    @operation(LayerBatch, Output, out=3, lse=2)
    def layer(self, batch: LayerBatch) -> Output:
        """Append a step's latents, then compute a layer's attention between its projections (S-21).

        ``out`` is dtype [T, H, V], and ``lse`` is float32 [T, H] in nats.
        """
        raise Unsupported(f"a layer of {batch.num_tokens} tokens is not declared")


OPERATIONS = operations_of(Runner)
"""All operations of the protocol, by name."""


def ops_of(runner: type) -> frozenset[str]:
    """Return the operations that a class of runners defines, for :attr:`Capabilities.ops`."""
    found = {name: getattr(runner, name, None) for name in OPERATIONS}
    return frozenset(
        name for name, method in found.items() if method not in {None, getattr(Runner, name)}
    )


class Backend(Protocol):
    """An implementation under test; a factory without arguments returns it."""

    @property
    def name(self) -> str:
        """The name in reports."""

    @property
    def version(self) -> str:
        """The version of the implementation."""

    @property
    def mode(self) -> str:
        """One of "gpu", "interpreter" (Triton's, on a CPU) and "cpu"."""

    @property
    def device(self) -> str:
        """The human-readable name of the device on which it runs."""

    @property
    def memory_bytes(self) -> int:
        """The number of bytes that are free for one cache."""

    @property
    def capabilities(self) -> Capabilities:
        """The declared capabilities."""

    def prepare(self, problem: Problem) -> Runner:
        """Return a runner for `problem`; raise ``InvalidArgument`` or ``Unsupported``.

        This method and every method of a runner may raise ``OutOfMemory``; the test is then
        skipped.
        """


class BoundedBackend(Backend, Protocol):
    """A backend that declares the feature "bounded"."""

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Return a runner that does not validate the values of a step, as engines use it.

        `problem`, shapes and dtypes are right. Lengths, tables, slots and masks may contain
        anything: a row that no rule allows is treated as padding.
        """
