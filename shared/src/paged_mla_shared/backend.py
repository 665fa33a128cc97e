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
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Mask, Metadata, Output, Problem

PRODUCTS = ("exact", "fast")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend says it can do. Closed: whatever is not listed is not claimed.

    Parameters
    ----------
    ops : frozenset of str
        "plan", "append", "attend", "merge", "gather_context", "quantise_queries", "prefill",
        "layer".
    dtypes, cache_formats : frozenset of str
    block_sizes, num_heads : frozenset of int
    head_dims : frozenset of (R, P)
    masks : frozenset of str
        "causal", "non_causal", "tree:qlen", "tree:full", "tree:packed".
    ropes : frozenset of {"interleaved", "neox"}
    features : frozenset of str
        "mixed": rows of different query length in one batch; "padding": rows with
        ``seq_len`` 0 and tokens past ``cu_seqlens_q[-1]``; "replay": a second step on one
        runner; "strided_cache", "strided_inputs": non-contiguous arrays; "large_offsets":
        caches past 2^31 elements; "explicit_slots": ``Batch.slot_mapping``;
        "validation": bad input raises before anything is written; "deterministic": a row has
        the same bits whatever its batch mates (S-20); "bounded": whatever values a step holds, no
        byte is read or written but those of its rows (:class:`BoundedBackend`).
    prefill_dims : frozenset of (N, P, V)
        Head dims of the ops "prefill" and "layer".
    max_query_len : int
        Longest query of one row.
    products : str
        One of :data:`PRODUCTS`. With the second, queries and weights may be rounded to 8 bits
        before they meet a cache of 8 bits, which has a wider budget.
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

    def unmet(self, problem: Problem, ops: Sequence[str], features: Sequence[str]) -> list[str]:
        """Return what `problem`, `ops` and `features` need beyond this, one phrase each."""
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
        return [f"{kind} {value} not declared" for kind, value, have in needs if value not in have]


def mask_name(problem: Problem) -> str:
    """Return the capability name of the problem's mask."""
    if problem.mask is Mask.TREE:
        return f"{problem.mask}:{problem.mask_spelling}"
    return str(problem.mask)


class Runner(Protocol):
    """One prepared problem with its cache. Every call may follow any other, with new batches.

    Arrays handed in belong to the caller and are never written. Results are new arrays.
    A batch no rule allows raises :class:`InvalidArgument` from the first call that takes it,
    and nothing is written.
    """

    def load_cache(self, image: CacheImage) -> None:
        """Make the cache equal `image`, poison included."""

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return raw bytes uint8 [n, block_bytes] of those blocks as they are now, scales last."""

    def plan(self, batch: Batch) -> Metadata:
        """Prepare `batch`; return the positions and slots derived for it (S-1, S-3)."""

    def append(self, batch: Batch) -> None:
        """Write the batch's ``ckv`` and ``k_pe`` to the cache (S-10)."""

    def attend(self, batch: Batch) -> Output:
        """Attend every query to what the cache holds now (S-4 to S-7)."""

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partials of one query set into one float32 answer (S-8).

        They may be views: only the last stride of ``out`` is known, 1.
        """
        raise Unsupported(f"merge of {len(partials)} partials is not declared")

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return every row's cached ``ckv`` [K, R] and ``k_pe`` [K, P], K = sum of ``seq_lens``."""
        raise Unsupported(f"gather_context of {batch.num_rows} rows is not declared")

    def quantise_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the queries, rotated, as e4m3 codes [T, H, R + P] with scales [T, H] (S-11).

        All have the one `scale` given; ``None`` takes one from the data for each token and head.
        """
        raise Unsupported(f"e4m3 of {batch.num_tokens} queries, scale {scale}, is not declared")

    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to keys and values of every head, causal or not; reads no cache (S-21)."""
        raise Unsupported(f"prefill of {batch.num_rows} rows is not declared")

    def layer(self, batch: LayerBatch) -> Output:
        """Append a step's latents and attend, between a layer's projections: [T, H, V] (S-21)."""
        raise Unsupported(f"a layer of {batch.num_tokens} tokens is not declared")


class Backend(Protocol):
    """An implementation under test, made by a factory that takes no argument."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def version(self) -> str:
        """Its own version."""

    @property
    def mode(self) -> str:
        """One of "gpu", "interpreter" (Triton's, on a CPU) and "cpu"."""

    @property
    def device(self) -> str:
        """Human name of what it runs on."""

    @property
    def memory_bytes(self) -> int:
        """Bytes free for one cache."""

    @property
    def capabilities(self) -> Capabilities:
        """What it claims."""

    def prepare(self, problem: Problem) -> Runner:
        """Build a runner; raises ``InvalidArgument`` or ``Unsupported``."""


class BoundedBackend(Backend, Protocol):
    """A backend that declares "bounded"."""

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Build a runner that looks at no values of a step, as engines run it.

        Shapes and dtypes are right; lengths, tables, slots and masks may hold anything. A row that
        no rule allows is taken for padding. `problem` is a right one.
        """
