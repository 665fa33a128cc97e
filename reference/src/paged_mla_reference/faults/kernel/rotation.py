"""Faults of rotation: pairings, positions, and slots that are computed from positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import (
    appending,
    of_rows,
    per_token,
    slots_to_write,
    with_cache,
    with_problem,
)
from paged_mla_reference.faults.kernel.rotation_change import (
    Array,
    Positions,
    placed,
    rotating_further,
    rotating_keys,
    rotating_queries,
    storing_further,
    with_rope,
)
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.cache import read_slots, write_slots
from paged_mla_reference.rules.paging import context_lens, query_spans
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import round_to
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import (
    Batch,
    Mask,
    MaskSpelling,
    Metadata,
    Problem,
    Rope,
    RopePairing,
)

SCORED = ("S-3", "S-5", "S-7", "S-12")


@kernel_fault(FaultClass.ROPE, *SCORED, cites="sglang#25015 mlx-lm#1805 onnxruntime-genai#2354")
def queries_are_rotated_one_late(oracle: Oracle) -> Oracle:
    """Queries are rotated by their position plus one."""
    return rotating_further(oracle, lambda _, batch: np.ones(batch.num_tokens, np.int64))


def _beyond_depth(problem: Problem, batch: Batch) -> Positions:
    """Return the index of each query minus its depth, [T]; 0 without a tree."""
    by_index = RIGHT.metadata(replace(problem, mask=Mask.CAUSAL), batch).positions
    return by_index - RIGHT.metadata(problem, batch).positions


@kernel_fault(FaultClass.ROPE, *SCORED, cites="mlxcel#1214 TensorRT-LLM#13081")
def siblings_are_rotated_by_index(oracle: Oracle) -> Oracle:
    """Queries of a tree are rotated by their index in the row, not by their depth."""
    return rotating_further(oracle, _beyond_depth)


@kernel_fault(FaultClass.ROPE, *SCORED, through=rotating_further)
def wide_trees_are_rotated_by_index(problem: Problem, batch: Batch) -> Positions:
    """Queries of a tree of more than 21 nodes are rotated by their index, not by their depth."""
    return np.where(of_rows(batch, batch.query_lens > 21), _beyond_depth(problem, batch), 0)


@kernel_fault(FaultClass.ROPE, "S-14", *SCORED, akin="mlxcel#1214", through=rotating_further)
def trees_spelled_otherwise_are_rotated_by_index(problem: Problem, batch: Batch) -> Positions:
    """Queries of a tree are rotated by their index unless the mask is spelled QLEN."""
    if problem.mask_spelling is MaskSpelling.QLEN:
        return np.zeros(batch.num_tokens, np.int64)
    return _beyond_depth(problem, batch)


@kernel_fault(FaultClass.ROPE, *SCORED, cites="TensorRT-LLM#14480")
def queries_are_not_rotated(oracle: Oracle) -> Oracle:
    """Queries are not rotated."""
    return with_problem(oracle, lambda p: replace(p, rope=None))


@kernel_fault(FaultClass.ROPE, *SCORED, through=rotating_queries)
def heads_past_the_32nd_are_not_rotated(x: Array, positions: Positions, rope: Rope) -> Array:
    """Queries of heads after the first 32 are not rotated."""
    turned = rotate(x, positions, rope)
    turned[:, 32:] = x[:, 32:]
    return turned


@kernel_fault(FaultClass.ROPE, *SCORED, through=rotating_further)
def queries_of_an_overlapping_tile_are_rotated_twice(problem: Problem, batch: Batch) -> Positions:
    """The last tile of 32 queries of a row overlaps the tile before, which is rotated twice."""
    positions = RIGHT.metadata(problem, batch).positions
    again = np.zeros_like(positions)
    for span in query_spans(batch):
        count = span.stop - span.start
        full = count // 32 * 32
        if 0 < full < count:
            overlap = slice(span.stop - 32, span.start + full)
            again[overlap] = positions[overlap]
    return again


@kernel_fault(FaultClass.ROPE, *SCORED, through=rotating_further)
def queries_are_rotated_as_those_of_the_longest_row(_: Problem, batch: Batch) -> Positions:
    """Queries are rotated as if each row had as many queries as the longest row of the step."""
    longest = int(batch.query_lens.max(initial=0))
    first = np.maximum(batch.seq_lens.astype(np.int64) - longest, 0)
    return per_token(batch, first - context_lens(batch))


@kernel_fault(FaultClass.ROPE, *SCORED, through=rotating_further)
def queries_of_long_chunks_are_rotated_from_0(_: Problem, batch: Batch) -> Positions:
    """In rows of more than 235 queries, queries are rotated from position 0, without context."""
    return per_token(batch, np.where(batch.query_lens > 235, -context_lens(batch), 0))


@kernel_fault(FaultClass.ROPE, "S-10", "S-12", *SCORED, cites="sglang#30111 sglang#30342 xllm#853")
def pairing_is_always_interleaved(oracle: Oracle) -> Oracle:
    """Queries and keys are always rotated with interleaved pairing, never with NeoX pairing."""
    return with_rope(oracle, lambda rope: replace(rope, pairing=RopePairing.INTERLEAVED))


@kernel_fault(FaultClass.ROPE, *SCORED, cites="sglang#30111", through=with_problem)
def queries_take_the_other_pairing(problem: Problem) -> Problem:
    """Queries are rotated with the other pairing than keys."""
    if problem.rope is None:
        return problem
    neox = problem.rope.pairing is RopePairing.NEOX
    pairing = RopePairing.INTERLEAVED if neox else RopePairing.NEOX
    return replace(problem, rope=replace(problem.rope, pairing=pairing))


@kernel_fault(
    FaultClass.ROPE,
    "S-10",
    *SCORED,
    cites="pegainfer#220 pegainfer#253",
    akin="hyprstream#1546 FastDeploy#7359 nanochat#520",
)
def rope_table_ends_at_4096(oracle: Oracle) -> Oracle:
    """Positions above 4095 are rotated as position 4095, the last row of a table."""
    return placed(oracle, lambda _, positions: np.minimum(positions, 4095))


@kernel_fault(FaultClass.ROPE, "S-10", *SCORED, akin="vllm#55910 vllm-ascend#1266")
def rope_table_ends_at_65536(oracle: Oracle) -> Oracle:
    """Positions above 65535 are rotated as position 65535, the last row of a table."""
    return placed(oracle, lambda _, positions: np.minimum(positions, 65535))


@kernel_fault(
    FaultClass.PRECISION,
    "S-10",
    *SCORED,
    cites="transformers#29285 candle#3520",
    akin="sglang-jax#1473",
)
def positions_are_rounded_to_bfloat16(oracle: Oracle) -> Oracle:
    """Positions are rounded to bfloat16 before angles are computed."""
    return placed(oracle, lambda _, positions: round_to(positions, "bfloat16").astype(np.int64))


@kernel_fault(FaultClass.PRECISION, "S-10", *SCORED, akin="mlx-lm#1076", through=placed)
def positions_are_rounded_to_float16(_: Batch, positions: Positions) -> Positions:
    """Positions are rounded to float16, and are at most 65504, before angles are computed."""
    rounded = round_to(np.minimum(positions, 65504), "float16")
    return rounded.astype(np.int64)


@kernel_fault(
    FaultClass.ROPE, "S-10", *SCORED, cites="omlx#2363", akin="rtp-llm#1163", through=placed
)
def rows_are_rotated_at_their_first_position(batch: Batch, positions: Positions) -> Positions:
    """All tokens of a row are rotated by the position of its first token."""
    first = positions.copy()
    for span in query_spans(batch):
        first[span] = positions[span][:1]
    return first


@kernel_fault(FaultClass.ROPE, *SCORED, through=rotating_further)
def queries_at_position_0_are_rotated(problem: Problem, batch: Batch) -> Positions:
    """A query at position 0 is rotated by position 1."""
    first = RIGHT.metadata(problem, batch).positions == 0
    return np.where(first, 1, 0)


@kernel_fault(
    FaultClass.ROPE, *SCORED, cites="sglang#19636 ktransformers-sglang#66", through=with_cache
)
def keys_of_a_chunk_are_read_unrotated(
    problem: Problem, batch: Batch, image: CacheImage
) -> CacheImage:
    """Rows of several tokens read the step's own keys without rotation."""
    slots = RIGHT.metadata(problem, batch).slot_mapping
    own = of_rows(batch, batch.query_lens > 1) & (slots >= 0)
    if problem.rope is None or not own.any():
        return image
    ckv, _ = read_slots(image, slots[own])
    return write_slots(image, slots[own], ckv, batch.k_pe[own])


@kernel_fault(FaultClass.ROPE, "S-10", "S-12", cites="sglang#22868", through=appending)
def fused_rope_stores_rotated_columns_only(problem: Problem, batch: Batch) -> Batch:
    """If the append rotates keys, it stores zeros as latents."""
    return batch if problem.rope is None else replace(batch, ckv=np.zeros_like(batch.ckv))


@kernel_fault(FaultClass.ROPE, "S-10", "S-12", cites="shainet#110")
def keys_are_rotated_twice(oracle: Oracle) -> Oracle:
    """Keys are rotated twice when they are stored."""
    return storing_further(oracle, lambda p, b: RIGHT.metadata(p, b).positions)


@kernel_fault(FaultClass.ROPE, "S-10", "S-12", through=rotating_keys)
def keys_of_small_steps_are_rotated_by_halves(x: Array, positions: Positions, rope: Rope) -> Array:
    """Appends of at most 4 tokens always rotate keys with NeoX pairing."""
    pairing = RopePairing.NEOX if len(x) <= 4 else rope.pairing
    return rotate(x, positions, replace(rope, pairing=pairing))


@kernel_fault(FaultClass.ROPE, "S-10", "S-12", through=storing_further)
def keys_of_a_tile_have_consecutive_positions(problem: Problem, batch: Batch) -> Positions:
    """Appends of more than 128 tokens use consecutive positions in each tile of 128 tokens."""
    positions = RIGHT.metadata(problem, batch).positions
    token: Positions = np.arange(batch.num_tokens)
    if batch.num_tokens <= 128:
        return np.zeros_like(positions)
    consecutive: Positions = positions[token // 128 * 128] + token % 128
    return consecutive - positions


@kernel_fault(FaultClass.ROPE, "S-10", "S-12")
def tokens_without_a_slot_have_no_position(oracle: Oracle) -> Oracle:
    """Tokens without a slot are not counted in the positions by which keys are rotated."""

    def by(problem: Problem, batch: Batch) -> Positions:
        positions = RIGHT.metadata(problem, batch).positions
        without = slots_to_write(oracle, problem, batch) < 0
        skipped = np.zeros_like(positions)
        for span in query_spans(batch):
            skipped[span] = np.cumsum(without[span])
        counted: Positions = np.maximum(positions - skipped, 0)
        return counted - positions

    return storing_further(oracle, by)


@kernel_fault(FaultClass.POSITION, "S-10", *SCORED)
def depths_of_nodes_end_at_16(oracle: Oracle) -> Oracle:
    """Tree nodes deeper than 16 get the position of depth 16."""

    def place(batch: Batch, positions: Positions) -> Positions:
        if batch.mask is None:
            return positions
        return np.minimum(positions, per_token(batch, context_lens(batch)) + 16)

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        return Metadata(place(batch, right.positions), right.slot_mapping)

    return replace(placed(oracle, place), metadata=metadata)


@kernel_fault(FaultClass.POSITION, "S-3")
def padded_rows_have_positions_below_zero(oracle: Oracle) -> Oracle:
    """Tokens of a padded row have negative positions, computed from its length of 0."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        below = np.arange(batch.num_tokens) - per_token(batch, batch.cu_seqlens_q[1:])
        padded = of_rows(batch, batch.seq_lens == 0)
        return Metadata(np.where(padded, below, right.positions), right.slot_mapping)

    return replace(oracle, metadata=metadata)


def _placing(oracle: Oracle, contexts: int) -> Oracle:
    """Return an oracle that adds `contexts` times the context to the positions of a plan."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        context = per_token(batch, context_lens(batch))
        return Metadata(right.positions + contexts * context, right.slot_mapping)

    return replace(oracle, metadata=metadata)


@kernel_fault(FaultClass.POSITION, "S-3", cites="FastDeploy#7727")
def context_is_added_twice(oracle: Oracle) -> Oracle:
    """Positions count the context twice."""
    return _placing(oracle, 1)


@kernel_fault(FaultClass.POSITION, "S-3", cites="FastDeploy#7727")
def positions_start_anew_in_each_chunk(oracle: Oracle) -> Oracle:
    """Positions start at 0 in each chunk, without the context."""
    return _placing(oracle, -1)


@kernel_fault(FaultClass.POSITION, "S-1", "S-3", "S-10", cites="vllm#54498 vllm#54519")
def slots_follow_positions(oracle: Oracle) -> Oracle:
    """Slots are computed from positions, so that siblings of a tree share a slot."""

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
