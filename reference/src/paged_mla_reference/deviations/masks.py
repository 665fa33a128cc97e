"""Wrong tree masks: bases, layouts, ancestors and siblings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.deviations.change import Matrices, masked
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Metadata, Problem

Array = NDArray[np.int64]
SHOWS = ("S-4", "S-14", "S-5", "S-7", "S-6")


def _cells(flat: NDArray[np.bool_], at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Read a flat mask, false behind its end."""
    return np.append(flat, False)[np.minimum(at, len(flat))]


def _flat(matrices: Matrices) -> NDArray[np.bool_]:
    return np.concatenate([np.zeros(0, bool), *(matrix.ravel() for matrix in matrices)])


@breaks(Fault.SIBLING, *SHOWS)
def the_first_node_is_everybodys_ancestor(oracle: Oracle) -> Oracle:
    """Every draft sees node 0, in trees of several roots too."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        return [matrix | (np.arange(len(matrix)) == 0) for matrix in matrices]

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS, cites="sglang#29450 sglang#29581 sglang#19741")
def mask_base_is_that_of_uniform_rows(oracle: Oracle) -> Oracle:
    """The mask of row r starts r times the first row's size in."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        size = matrices[0].size if matrices else 0
        return [
            _cells(_flat(matrices), row * size + np.arange(matrix.size)).reshape(matrix.shape)
            for row, matrix in enumerate(matrices)
        ]

    return masked(oracle, change)


def _starting(oracle: Oracle, spelling: MaskSpelling, cells: Callable[[Batch], Array]) -> Oracle:
    """Read masks of one spelling as if rows had other numbers of cells, int64 [B]."""

    def change(problem: Problem, batch: Batch, matrices: Matrices) -> Matrices:
        if problem.mask_spelling is not spelling:
            return matrices
        assert batch.mask is not None
        counts = cells(batch)
        starts = np.cumsum(counts) - counts
        read = []
        for row, matrix in enumerate(matrices):
            nodes = len(matrix)
            width = nodes if spelling is MaskSpelling.QLEN else int(batch.seq_lens[row])
            lines = _cells(batch.mask, starts[row] + np.arange(nodes * width))
            lines = lines.reshape(nodes, width)
            read.append(lines[:, -nodes:] if width and nodes else matrix)
        return read

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS)
def masks_of_padded_rows_are_not_counted(oracle: Oracle) -> Oracle:
    """Rows behind a padded one with nodes read their QLEN mask where its begins."""

    def cells(batch: Batch) -> Array:
        return np.where(batch.seq_lens > 0, batch.query_lens.astype(np.int64) ** 2, 0)

    return _starting(oracle, MaskSpelling.QLEN, cells)


@breaks(Fault.MASK, *SHOWS)
def padded_rows_have_cells_in_a_full_mask(oracle: Oracle) -> Oracle:
    """Rows behind a padded one with nodes read their FULL mask as many cells late."""

    def cells(batch: Batch) -> Array:
        return batch.query_lens.astype(np.int64) * np.maximum(batch.seq_lens, batch.query_lens)

    return _starting(oracle, MaskSpelling.FULL, cells)


@breaks(Fault.MASK, *SHOWS)
def packed_lines_of_padded_rows_are_not_counted(oracle: Oracle) -> Oracle:
    """Rows behind a padded one with nodes read their packed lines from its first."""

    def change(problem: Problem, batch: Batch, matrices: Matrices) -> Matrices:
        if problem.mask_spelling is not MaskSpelling.PACKED:
            return matrices
        assert batch.mask is not None
        lines = np.unpackbits(batch.mask, axis=1, bitorder="little").astype(bool)
        counts = np.where(batch.seq_lens > 0, batch.query_lens, 0)
        starts = np.cumsum(counts) - counts
        return [
            lines[start : start + len(matrix), : len(matrix)]
            for start, matrix in zip(starts.tolist(), matrices, strict=True)
        ]

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS, cites="TensorRT-LLM#13006", akin="TensorRT-LLM#13426")
def mask_lines_have_the_allocated_width(oracle: Oracle) -> Oracle:
    """Lines of a QLEN mask are as far apart as the longest tree needs."""

    def change(problem: Problem, batch: Batch, matrices: Matrices) -> Matrices:
        if problem.mask_spelling is not MaskSpelling.QLEN:
            return matrices
        sizes = batch.query_lens.astype(np.int64) ** 2
        starts = np.cumsum(sizes) - sizes
        flat, width = _flat(matrices), problem.max_draft_tokens
        return [
            _cells(flat, start + np.arange(n)[:, None] * width + np.arange(n))
            for start, n in zip(starts.tolist(), batch.query_lens.tolist(), strict=True)
        ]

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS, akin="TensorRT-LLM#13006")
def full_mask_is_read_without_its_context(oracle: Oracle) -> Oracle:
    """FULL lines are read from their first column on."""

    def change(problem: Problem, batch: Batch, matrices: Matrices) -> Matrices:
        if problem.mask_spelling is not MaskSpelling.FULL:
            return matrices
        read = []
        for matrix, seq_len in zip(matrices, batch.seq_lens.tolist(), strict=True):
            context = np.ones((len(matrix), max(seq_len - len(matrix), 0)), bool)
            read.append(np.hstack([context, matrix])[:, : len(matrix)])
        return read

    return masked(oracle, change)


def _packed(oracle: Oracle, change: Callable[[NDArray[np.bool_]], NDArray[np.bool_]]) -> Oracle:
    """Change the matrices that came as packed bits."""

    def changed(problem: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        packed = problem.mask_spelling is MaskSpelling.PACKED
        return [change(matrix) for matrix in matrices] if packed else matrices

    return masked(oracle, changed)


@breaks(Fault.MASK, *SHOWS, akin="llguidance#330")
def packed_bits_are_big_endian(oracle: Oracle) -> Oracle:
    """Bit 0 of a packed byte is taken for the eighth node."""

    def swapped(matrix: NDArray[np.bool_]) -> NDArray[np.bool_]:
        bits = np.packbits(matrix, axis=1, bitorder="little")
        return np.unpackbits(bits, axis=1)[:, : len(matrix)].astype(bool)

    return _packed(oracle, swapped)


@breaks(Fault.MASK, *SHOWS, cites="sglang#29450")
def nodes_past_the_eighth_are_cut(oracle: Oracle) -> Oracle:
    """A line of the mask is one byte."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        return [matrix & (np.arange(len(matrix)) < 8) for matrix in matrices]

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS, cites="TensorRT-LLM#12962", akin="sglang@eagle_utils")
def packed_nodes_past_the_32nd_are_cut(oracle: Oracle) -> Oracle:
    """Of a packed line one word of 32 bits is read."""
    return _packed(oracle, lambda matrix: matrix & (np.arange(len(matrix)) < 32))


@breaks(Fault.MASK, *SHOWS)
def sign_bits_of_packed_words_are_lost(oracle: Oracle) -> Oracle:
    """Words of 32 bits carry 31 nodes each: nobody sees nodes 31 and 63."""
    return _packed(oracle, lambda matrix: matrix & (np.arange(len(matrix)) % 32 != 31))


@breaks(Fault.MASK, *SHOWS)
def mask_shifts_wrap_at_32(oracle: Oracle) -> Oracle:
    """Bool masks become words by shifts that keep 5 bits: node 32 is seen by who sees node 0."""

    def change(problem: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        if problem.mask_spelling is MaskSpelling.PACKED:
            return matrices
        return [matrix[:, np.arange(len(matrix)) % 32] for matrix in matrices]

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS, akin="TensorRT-LLM#12962")
def nodes_past_the_64th_are_cut(oracle: Oracle) -> Oracle:
    """A line of the mask is one word of 64 bits."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        return [matrix & (np.arange(len(matrix)) < 64) for matrix in matrices]

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS, akin="sglang#29587")
def mask_is_transposed(oracle: Oracle) -> Oracle:
    """Nodes see their descendants."""
    return masked(oracle, lambda _p, _b, matrices: [matrix.T for matrix in matrices])


@breaks(Fault.MASK, *SHOWS, akin="sglang#8409")
def ancestors_are_forgotten(oracle: Oracle) -> Oracle:
    """Nodes see the context and themselves."""
    return masked(oracle, lambda _p, _b, matrices: [np.eye(len(m), dtype=bool) for m in matrices])


@breaks(Fault.MASK, *SHOWS, akin="TensorRT-LLM#13006")
def every_row_takes_the_first_mask(oracle: Oracle) -> Oracle:
    """Rows as long as the first take its mask."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        return [matrices[0] if m.shape == matrices[0].shape else m for m in matrices]

    return masked(oracle, change)


@breaks(Fault.SIBLING, *SHOWS, cites="FastDeploy#3514 vllm#17560")
def trees_are_taken_for_chains(oracle: Oracle) -> Oracle:
    """Every earlier node is visible."""
    return masked(
        oracle, lambda _p, _b, matrices: [np.tril(np.ones_like(matrix)) for matrix in matrices]
    )


@breaks(Fault.SIBLING, *SHOWS, akin="EAGLE#336")
def the_node_before_is_seen(oracle: Oracle) -> Oracle:
    """Every node also sees the one stored before it, a sibling perhaps."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        return [matrix | np.eye(len(matrix), k=-1, dtype=bool) for matrix in matrices]

    return masked(oracle, change)


@breaks(Fault.SIBLING, *SHOWS, akin="EAGLE#336")
def only_the_last_node_leaks(oracle: Oracle) -> Oracle:
    """The last node of a tree sees all others."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        leaky: list[NDArray[np.bool_]] = [matrix.copy() for matrix in matrices]
        for matrix in leaky:
            matrix[-1:] = True
        return leaky

    return masked(oracle, change)


@breaks(Fault.POSITION, "S-3", cites="mlxcel#1214 TensorRT-LLM#13081")
def tree_positions_follow_the_index(oracle: Oracle) -> Oracle:
    """Siblings have different positions."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        return RIGHT.metadata(replace(problem, mask=Mask.CAUSAL), batch)

    return replace(oracle, metadata=metadata)
