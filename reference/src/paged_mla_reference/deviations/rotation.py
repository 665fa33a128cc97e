"""Wrong rotation: pairings, positions, and the slots taken from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.cache import read_slots, write_slots
from paged_mla_reference.deviations.change import appending, imagined, of_rows, posed, reading
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.paging import context_lens, query_spans
from paged_mla_reference.rope import rotate
from paged_mla_reference.rounding import round_to, widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import (
    Batch,
    Mask,
    MaskSpelling,
    Metadata,
    Problem,
    Rope,
    RopePairing,
    Yarn,
)

SCORED = ("S-3", "S-5", "S-7", "S-12")


Distances = Callable[[Problem, Batch], NDArray[np.int64]]  # [T]


def _turned(x: NDArray[Any], by: NDArray[np.int64], rope: Rope) -> NDArray[Any]:
    """Rotate `by` so many positions, without yarn's magnitude."""
    yarn = rope.yarn and replace(rope.yarn, mscale=rope.yarn.mscale_all_dim)
    return rotate(widen(x), by, replace(rope, yarn=yarn)).astype(x.dtype)


def _rotating_further(oracle: Oracle, by: Distances) -> Oracle:
    """Rotate queries so many positions more."""

    def turned(problem: Problem, batch: Batch) -> Batch:
        if problem.rope is None:
            return batch
        return replace(batch, q_pe=_turned(batch.q_pe, by(problem, batch), problem.rope))

    return reading(oracle, turned)


def _storing_further(oracle: Oracle, by: Distances) -> Oracle:
    """Rotate keys so many positions more when they are stored."""

    def turned(problem: Problem, batch: Batch) -> Batch:
        if problem.rope is None:
            return batch
        return replace(batch, k_pe=_turned(batch.k_pe, by(problem, batch), problem.rope))

    return appending(oracle, turned)


def _placed(
    oracle: Oracle, place: Callable[[Batch, NDArray[np.int64]], NDArray[np.int64]]
) -> Oracle:
    """Rotate queries and keys at other positions."""

    def by(problem: Problem, batch: Batch) -> NDArray[np.int64]:
        positions = RIGHT.metadata(problem, batch).positions
        return place(batch, positions) - positions

    return _storing_further(_rotating_further(oracle, by), by)


def _with_rope(oracle: Oracle, change: Callable[[Rope], Rope]) -> Oracle:
    """Rotate queries and keys by another rope."""

    def other(problem: Problem) -> Problem:
        return problem if problem.rope is None else replace(problem, rope=change(problem.rope))

    both = posed(oracle, other)
    return replace(both, append=lambda p, b, image: oracle.append(other(p), b, image))


@breaks(Fault.ROPE, *SCORED, cites="sglang#25015 mlx-lm#1805 onnxruntime-genai#2354")
def queries_are_rotated_one_late(oracle: Oracle) -> Oracle:
    """Queries are rotated at their position plus one."""
    return _rotating_further(oracle, lambda _, batch: np.ones(batch.num_tokens, np.int64))


@breaks(Fault.ROPE, *SCORED, cites="mlxcel#1214 TensorRT-LLM#13081")
def siblings_are_rotated_by_index(oracle: Oracle) -> Oracle:
    """Queries of a tree are rotated at their index, not at their depth."""

    def beyond_depth(problem: Problem, batch: Batch) -> NDArray[np.int64]:
        by_index = RIGHT.metadata(replace(problem, mask=Mask.CAUSAL), batch).positions
        return by_index - RIGHT.metadata(problem, batch).positions

    return _rotating_further(oracle, beyond_depth)


@breaks(Fault.ROPE, "S-14", *SCORED, akin="mlxcel#1214")
def trees_spelled_otherwise_are_rotated_by_index(oracle: Oracle) -> Oracle:
    """Depths are known of masks that are spelled QLEN alone: other nodes take their index."""

    def beyond_depth(problem: Problem, batch: Batch) -> NDArray[np.int64]:
        if problem.mask_spelling is MaskSpelling.QLEN:
            return np.zeros(batch.num_tokens, np.int64)
        by_index = RIGHT.metadata(replace(problem, mask=Mask.CAUSAL), batch).positions
        return by_index - RIGHT.metadata(problem, batch).positions

    return _rotating_further(oracle, beyond_depth)


@breaks(Fault.ROPE, *SCORED, cites="TensorRT-LLM#14480")
def queries_are_not_rotated(oracle: Oracle) -> Oracle:
    """Queries meet rotated keys as they came."""
    return posed(oracle, lambda p: replace(p, rope=None))


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED, cites="sglang#30111 sglang#30342 xllm#853")
def pairing_is_always_interleaved(oracle: Oracle) -> Oracle:
    """NeoX pairing is ignored, in queries and in keys."""
    return _with_rope(oracle, lambda rope: replace(rope, pairing=RopePairing.INTERLEAVED))


@breaks(Fault.ROPE, *SCORED, cites="sglang#30111")
def queries_take_the_other_pairing(oracle: Oracle) -> Oracle:
    """Queries are rotated with the pairing that keys do not have."""

    def other(problem: Problem) -> Problem:
        if problem.rope is None:
            return problem
        neox = problem.rope.pairing is RopePairing.NEOX
        pairing = RopePairing.INTERLEAVED if neox else RopePairing.NEOX
        return replace(problem, rope=replace(problem.rope, pairing=pairing))

    return posed(oracle, other)


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED, cites="torchtitan#4117 prime-rl#2681")
def yarn_is_ignored(oracle: Oracle) -> Oracle:
    """Frequencies are not interpolated, in queries and in keys."""
    return _with_rope(oracle, lambda rope: replace(rope, yarn=None))


def _with_yarn(oracle: Oracle, change: Callable[[Yarn], Yarn]) -> Oracle:
    """Rotate queries and keys by another yarn, where there is one."""
    return _with_rope(
        oracle, lambda rope: replace(rope, yarn=None if rope.yarn is None else change(rope.yarn))
    )


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED, cites="imp#880 sglang#22711")
def yarn_magnitude_is_one_mscale(oracle: Oracle) -> Oracle:
    """Cosines carry the mscale of the rotated part, not its quotient by all dims'."""
    return _with_yarn(oracle, lambda yarn: replace(yarn, mscale_all_dim=0.0))


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED, akin="exllamav3#259")
def yarn_magnitude_is_always_1(oracle: Oracle) -> Oracle:
    """The two mscales are taken for equal, so that cosines carry none."""
    return _with_yarn(oracle, lambda yarn: replace(yarn, mscale=yarn.mscale_all_dim))


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED, akin="mlx-lm#1189")
def theta_is_always_10000(oracle: Oracle) -> Oracle:
    """The base of the rotation is not asked for."""
    return _with_rope(oracle, lambda rope: replace(rope, theta=1e4))


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED)
def theta_is_one_of_two(oracle: Oracle) -> Oracle:
    """The base of the rotation is 1e6 if it is large, else 1e4."""
    return _with_rope(oracle, lambda rope: replace(rope, theta=1e6 if rope.theta > 1e5 else 1e4))


@breaks(
    Fault.ROPE,
    "S-10",
    *SCORED,
    cites="pegainfer#220 pegainfer#253",
    akin="hyprstream#1546 FastDeploy#7359 nanochat#520",
)
def rope_table_ends_at_4096(oracle: Oracle) -> Oracle:
    """Positions past the 4096 rows of a table take its last one."""
    return _placed(oracle, lambda _, positions: np.minimum(positions, 4095))


@breaks(Fault.ROPE, "S-10", *SCORED, akin="vllm#55910 vllm-ascend#1266")
def rope_table_ends_at_65536(oracle: Oracle) -> Oracle:
    """Positions past the 65536 rows of a table take its last one."""
    return _placed(oracle, lambda _, positions: np.minimum(positions, 65535))


@breaks(
    Fault.PRECISION, "S-10", *SCORED, cites="transformers#29285 candle#3520", akin="sglang-jax#1473"
)
def positions_are_rounded_to_bfloat16(oracle: Oracle) -> Oracle:
    """Angles are computed from positions of 8 significant bits."""
    return _placed(oracle, lambda _, positions: round_to(positions, "bfloat16").astype(np.int64))


@breaks(Fault.PRECISION, "S-10", *SCORED, akin="mlx-lm#1076")
def positions_are_rounded_to_float16(oracle: Oracle) -> Oracle:
    """Angles are computed from positions of 11 significant bits, none above 65504."""

    def place(_: Batch, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        rounded = round_to(np.minimum(positions, 65504), "float16")
        return rounded.astype(np.int64)

    return _placed(oracle, place)


@breaks(Fault.ROPE, "S-10", *SCORED, cites="omlx#2363", akin="rtp-llm#1163")
def rows_are_rotated_at_their_first_position(oracle: Oracle) -> Oracle:
    """All tokens of a row are rotated as its first one."""

    def place(batch: Batch, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        first = positions.copy()
        for span in query_spans(batch):
            first[span] = positions[span][:1]
        return first

    return _placed(oracle, place)


@breaks(Fault.ROPE, *SCORED)
def queries_at_position_0_are_rotated(oracle: Oracle) -> Oracle:
    """A query at position 0 is rotated as one at position 1."""

    def by(problem: Problem, batch: Batch) -> NDArray[np.int64]:
        first = RIGHT.metadata(problem, batch).positions == 0
        return np.where(first, 1, 0)

    return _rotating_further(oracle, by)


@breaks(Fault.ROPE, *SCORED, cites="sglang#19636 ktransformers-sglang#66")
def keys_of_a_chunk_are_read_unrotated(oracle: Oracle) -> Oracle:
    """The cache gets rotated keys; a step of several tokens reads its own as they came."""

    def change(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        slots = RIGHT.metadata(problem, batch).slot_mapping
        own = of_rows(batch, batch.query_lens > 1) & (slots >= 0)
        if problem.rope is None or not own.any():
            return image
        ckv, _ = read_slots(image, slots[own])
        return write_slots(image, slots[own], ckv, batch.k_pe[own])

    return imagined(oracle, change)


@breaks(Fault.ROPE, "S-10", "S-12", cites="sglang#22868")
def fused_rope_stores_rotated_columns_only(oracle: Oracle) -> Oracle:
    """With a rope inside the step, latents are not stored."""

    def change(problem: Problem, batch: Batch) -> Batch:
        return batch if problem.rope is None else replace(batch, ckv=np.zeros_like(batch.ckv))

    return appending(oracle, change)


@breaks(Fault.ROPE, "S-10", "S-12", cites="shainet#110")
def keys_are_rotated_twice(oracle: Oracle) -> Oracle:
    """Keys are rotated again when they are stored."""
    return _storing_further(oracle, lambda p, b: RIGHT.metadata(p, b).positions)


def _placing(oracle: Oracle, contexts: int) -> Oracle:
    """Add the cached length to the positions of a plan so many times more."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        context = np.zeros(batch.num_tokens, np.int64)
        live = int(batch.cu_seqlens_q[-1])
        context[:live] = np.repeat(context_lens(batch), batch.query_lens)
        return Metadata(right.positions + contexts * context, right.slot_mapping)

    return replace(oracle, metadata=metadata)


@breaks(Fault.POSITION, "S-3", cites="FastDeploy#7727")
def context_is_added_twice(oracle: Oracle) -> Oracle:
    """Positions add the cached length and the length that holds it already."""
    return _placing(oracle, 1)


@breaks(Fault.POSITION, "S-3", cites="FastDeploy#7727")
def positions_start_anew_in_each_chunk(oracle: Oracle) -> Oracle:
    """Positions count from the chunk's first token."""
    return _placing(oracle, -1)


@breaks(Fault.POSITION, "S-1", "S-3", "S-10", cites="vllm#54498 vllm#54519")
def slots_follow_positions(oracle: Oracle) -> Oracle:
    """Siblings of a tree share a slot, because they share a position."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        slots = right.slot_mapping.copy()
        rows = np.repeat(np.arange(batch.num_rows), batch.query_lens)
        for token, row in enumerate(rows.tolist()):
            block, index = divmod(int(right.positions[token]), problem.block_size)
            if slots[token] >= 0:
                slots[token] = int(batch.block_table[row, block]) * problem.block_size + index
        return Metadata(right.positions, slots)

    return replace(oracle, metadata=metadata)
