"""Wrong tree masks: bases, layouts, ancestors and siblings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.deviations.change import Matrices, masked
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Metadata, Problem

SHOWS = ("S-4", "S-14", "S-5", "S-7", "S-6")


@breaks(Fault.MASK, *SHOWS, cites="sglang#29450 sglang#29581 sglang#19741")
def mask_base_is_that_of_uniform_rows(oracle: Oracle) -> Oracle:
    """The mask of row r starts r times the first row's size in."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        flat = np.concatenate([np.zeros(0, bool), *(m.ravel() for m in matrices)])
        size = matrices[0].size if matrices else 0
        moved = []
        for row, matrix in enumerate(matrices):
            read = flat[row * size : row * size + matrix.size]
            padded = np.zeros(matrix.size, bool)
            padded[: len(read)] = read
            moved.append(padded.reshape(matrix.shape))
        return moved

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS)
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


@breaks(Fault.MASK, *SHOWS)
def packed_bits_are_big_endian(oracle: Oracle) -> Oracle:
    """Bit 0 of a packed byte is taken for the eighth node."""

    def change(problem: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        if problem.mask_spelling is not MaskSpelling.PACKED:
            return matrices
        swapped = []
        for matrix in matrices:
            packed = np.packbits(matrix, axis=1, bitorder="little")
            swapped.append(np.unpackbits(packed, axis=1)[:, : len(matrix)].astype(bool))
        return swapped

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS, cites="sglang#29450")
def nodes_past_the_eighth_are_cut(oracle: Oracle) -> Oracle:
    """A line of the mask is one byte."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        return [matrix & (np.arange(len(matrix)) < 8) for matrix in matrices]

    return masked(oracle, change)


@breaks(Fault.MASK, *SHOWS)
def mask_is_transposed(oracle: Oracle) -> Oracle:
    """Nodes see their descendants."""
    return masked(oracle, lambda _p, _b, matrices: [matrix.T for matrix in matrices])


@breaks(Fault.MASK, *SHOWS)
def ancestors_are_forgotten(oracle: Oracle) -> Oracle:
    """Nodes see the context and themselves."""
    return masked(oracle, lambda _p, _b, matrices: [np.eye(len(m), dtype=bool) for m in matrices])


@breaks(Fault.MASK, *SHOWS)
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


@breaks(Fault.SIBLING, *SHOWS)
def the_node_before_is_seen(oracle: Oracle) -> Oracle:
    """Every node also sees the one stored before it, a sibling perhaps."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        return [matrix | np.eye(len(matrix), k=-1, dtype=bool) for matrix in matrices]

    return masked(oracle, change)


@breaks(Fault.SIBLING, *SHOWS)
def only_the_last_node_leaks(oracle: Oracle) -> Oracle:
    """The last node of a tree sees all others."""

    def change(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        leaky: list[NDArray[np.bool_]] = [matrix.copy() for matrix in matrices]
        for matrix in leaky:
            matrix[-1:] = True
        return leaky

    return masked(oracle, change)


@breaks(Fault.POSITION, "S-3")
def tree_positions_follow_the_index(oracle: Oracle) -> Oracle:
    """Siblings have different positions."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        return RIGHT.metadata(replace(problem, mask=Mask.CAUSAL), batch)

    return replace(oracle, metadata=metadata)
