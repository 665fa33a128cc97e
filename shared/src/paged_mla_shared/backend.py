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
    """What a backend says it can do. Closed: whatever is not listed is not claimed.

    Parameters
    ----------
    ops : frozenset of str
        Names of :data:`OPERATIONS`. :func:`ops_of` finds those of a class of runners.
    dtypes : frozenset of str
    cache_formats : frozenset of str
        Names of :data:`paged_mla_shared.formats.FORMATS`.
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
        "validation": bad input raises before anything is written; "batch_invariant": a row has
        the same bits whatever its batch mates (S-20); "bounded": whatever values a step holds, no
        byte is read or written but those of its rows (:class:`BoundedBackend`).
    prefill_dims : frozenset of (N, P, V)
        Head dims of ``prefill`` and ``layer``.
    max_query_len : int
        Longest query of one row.
    products : str
        One of :data:`PRODUCTS`. With the second, queries and weights may be rounded to 8 bits
        before they meet a cache of 8 bits, which has a wider budget.
    softmax_scale : float or None
        The one scale of a kernel that is told none; ``None`` takes that of each problem.
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
        if self.softmax_scale is not None:
            needs.append(("softmax_scale", problem.softmax_scale, frozenset({self.softmax_scale})))
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

    Axes: B rows of a step, T its query tokens, H heads, R and P of the problem's dims, N and V of
    a head before absorption, K cached tokens of all rows; *dtype* is the problem's.
    """

    def load_cache(self, image: CacheImage) -> None:
        """Make the cache equal `image`, poison included; called first, and between steps."""

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return raw bytes uint8 [n, block_bytes] of blocks [n] as they are now.

        Each block's scales, if the format keeps any, lie behind its ``block_stride`` bytes.
        """

    @operation(Batch, Metadata, positions=1, slot_mapping=1)
    def plan(self, batch: Batch) -> Metadata:
        """Prepare `batch`, once a step; return positions and slots, int64 [T], exact (S-1, S-3).

        They are 0 and -1 for padding, and for the first ``query_len - seq_len`` queries of a row
        with fewer keys than queries.
        """
        raise Unsupported(f"plan of {batch.num_rows} rows is not declared")

    @operation(Batch)
    def append(self, batch: Batch) -> None:
        """Write ``ckv`` and ``k_pe`` to the cache, and no other byte (S-10).

        It is called once a layer, before ``attend``. Keys are rotated if the problem has a rope.
        """
        raise Unsupported(f"append of {batch.num_tokens} tokens is not declared")

    @operation(Batch, Output, out=3, lse=2)
    def attend(self, batch: Batch) -> Output:
        """Attend every query to what the cache holds now (S-4 to S-7), once a layer.

        ``out`` is dtype [T, H, R], ``lse`` float32 [T, H] in nats; 0 and -inf where nothing is
        visible.
        """
        raise Unsupported(f"attend of {batch.num_tokens} tokens is not declared")

    @operation(Sequence, Output, out=3, lse=2)
    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partials of one query set into one float32 answer (S-8).

        They may be views: only the last stride of ``out`` is known, 1. Where an ``lse`` is -inf,
        its ``out`` may hold anything, NaN included.
        """
        raise Unsupported(f"merge of {len(partials)} partials is not declared")

    @operation(Batch, tuple, ckv=2, k_pe=2, reads_rows=True)
    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return every row's cached ``ckv`` [K, R] and ``k_pe`` [K, P], K = sum of ``seq_lens``.

        They are of dtype, in row order, bit for bit; from formats of 8 bits each value is rounded
        to float32, then to dtype (S-1, S-9).
        """
        raise Unsupported(f"gather_context of {batch.num_rows} rows is not declared")

    @operation(Batch, tuple, codes=3, scales=2)
    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the queries, rotated, as e4m3 codes [T, H, R + P] with scales [T, H] (S-11).

        All have the one `scale` given, a float32 > 0; ``None`` takes one from the data for each
        token and head. Both results are exact; lines of padding hold anything.
        """
        raise Unsupported(f"e4m3 of {batch.num_tokens} queries, scale {scale}, is not declared")

    @operation(PrefillBatch, Output, out=3, lse=2)
    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to keys and values of every head, causal or not; reads no cache (S-21).

        ``out`` is dtype [T, H, V], ``lse`` float32 [T, H] in nats; 0 and -inf where nothing is
        visible.
        """
        raise Unsupported(f"prefill of {batch.num_rows} rows is not declared")

    @operation(LayerBatch, Output, out=3, lse=2)
    def layer(self, batch: LayerBatch) -> Output:
        """Append a step's latents, then attend, between a layer's projections (S-21).

        ``out`` is dtype [T, H, V], ``lse`` float32 [T, H] in nats.
        """
        raise Unsupported(f"a layer of {batch.num_tokens} tokens is not declared")


OPERATIONS = operations_of(Runner)
"""Every operation of the protocol, by name."""


def ops_of(runner: type) -> frozenset[str]:
    """Return the operations that a class of runners has itself, for :attr:`Capabilities.ops`."""
    found = {name: getattr(runner, name, None) for name in OPERATIONS}
    return frozenset(
        name for name, method in found.items() if method not in {None, getattr(Runner, name)}
    )


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
        """Build a runner; raises ``InvalidArgument`` or ``Unsupported``.

        It and every call of a runner may raise ``OutOfMemory``: the test is then not run.
        """


class BoundedBackend(Backend, Protocol):
    """A backend that declares "bounded"."""

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Build a runner that looks at no values of a step, as engines run it.

        Shapes and dtypes are right; lengths, tables, slots and masks may hold anything. A row that
        no rule allows is taken for padding. `problem` is a right one.
        """
