"""Faults of tree masks: their starts, layouts, ancestors and siblings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import Matrices, masked, with_batch
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.paging import query_spans
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Metadata, Problem

Array = NDArray[np.int64]
Matrix = NDArray[np.bool_]
Lines = NDArray[np.uint8]
SHOWS = ("S-4", "S-14", "S-5", "S-7", "S-6")


def _cells(flat: NDArray[np.bool_], at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Read a flat mask; elements after its end are false."""
    return np.append(flat, False)[np.minimum(at, len(flat))]


def _flat(matrices: Matrices) -> NDArray[np.bool_]:
    return np.concatenate([np.zeros(0, bool), *(matrix.ravel() for matrix in matrices)])


@kernel_fault(FaultClass.SIBLING, *SHOWS, through=masked)
def the_first_node_is_everybodys_ancestor(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """Every draft token sees node 0, even if that is not its ancestor."""
    return [matrix | (np.arange(len(matrix)) == 0) for matrix in matrices]


@kernel_fault(
    FaultClass.MASK, *SHOWS, cites="sglang#29450 sglang#29581 sglang#19741", through=masked
)
def mask_base_is_that_of_uniform_rows(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """The mask of row r is read from r times the size of the first row's mask."""
    size = matrices[0].size if matrices else 0
    return [
        _cells(_flat(matrices), row * size + np.arange(matrix.size)).reshape(matrix.shape)
        for row, matrix in enumerate(matrices)
    ]


def _before(counts: Array) -> Array:
    """Return the sum over the rows before each row, int64 [B]."""
    return np.cumsum(counts, dtype=np.int64) - counts


def _starting(oracle: Oracle, spelling: MaskSpelling, starts: Callable[[Batch], Array]) -> Oracle:
    """Return an oracle that reads masks of one spelling from other starts, int64 [B]."""

    def change(problem: Problem, batch: Batch, matrices: Matrices) -> Matrices:
        if problem.mask_spelling is not spelling:
            return matrices
        assert batch.mask is not None
        read = []
        for row, (matrix, start) in enumerate(zip(matrices, starts(batch), strict=True)):
            nodes = len(matrix)
            width = nodes if spelling is MaskSpelling.QLEN else int(batch.seq_lens[row])
            lines = _cells(batch.mask, start + np.arange(nodes * width)).reshape(nodes, width)
            read.append(lines[:, -nodes:] if width and nodes else matrix)
        return read

    return masked(oracle, change)


@kernel_fault(FaultClass.MASK, *SHOWS)
def masks_of_padded_rows_are_not_counted(oracle: Oracle) -> Oracle:
    """The start of a row's QLEN mask does not count the masks of padded rows before it."""

    def starts(batch: Batch) -> Array:
        return _before(np.where(batch.seq_lens > 0, batch.query_lens.astype(np.int64) ** 2, 0))

    return _starting(oracle, MaskSpelling.QLEN, starts)


@kernel_fault(FaultClass.MASK, *SHOWS)
def padded_rows_have_cells_in_a_full_mask(oracle: Oracle) -> Oracle:
    """The start of a row's FULL mask counts elements for padded rows, which have none."""

    def starts(batch: Batch) -> Array:
        nodes = batch.query_lens.astype(np.int64)
        return _before(nodes * np.maximum(batch.seq_lens, nodes))

    return _starting(oracle, MaskSpelling.FULL, starts)


@kernel_fault(FaultClass.MASK, *SHOWS)
def full_mask_bases_keep_20_bits(oracle: Oracle) -> Oracle:
    """The start of a row's FULL mask keeps only 20 bits."""

    def starts(batch: Batch) -> Array:
        return _before(batch.query_lens.astype(np.int64) * batch.seq_lens) % 2**20

    return _starting(oracle, MaskSpelling.FULL, starts)


@kernel_fault(FaultClass.MASK, *SHOWS)
def full_mask_bases_follow_the_rows_own_queries(oracle: Oracle) -> Oracle:
    """The start of a row's FULL mask assumes that earlier rows have as many nodes as the row."""

    def starts(batch: Batch) -> Array:
        return batch.query_lens * _before(batch.seq_lens.astype(np.int64))

    return _starting(oracle, MaskSpelling.FULL, starts)


@kernel_fault(FaultClass.MASK, *SHOWS, through=masked)
def packed_lines_of_padded_rows_are_not_counted(
    problem: Problem, batch: Batch, matrices: Matrices
) -> Matrices:
    """The start of a row's packed mask does not count the lines of padded rows before it."""
    if problem.mask_spelling is not MaskSpelling.PACKED:
        return matrices
    assert batch.mask is not None
    lines = np.unpackbits(batch.mask, axis=1, bitorder="little").astype(bool)
    starts = _before(np.where(batch.seq_lens > 0, batch.query_lens, 0))
    return [
        lines[start : start + len(matrix), : len(matrix)]
        for start, matrix in zip(starts.tolist(), matrices, strict=True)
    ]


def _reading_lines(oracle: Oracle, change: Callable[[Problem, Batch, Lines], Lines]) -> Oracle:
    """Return an oracle whose attention reads other lines of packed masks, uint8 [T, W]."""

    def other_lines(problem: Problem, batch: Batch) -> Batch:
        if problem.mask_spelling is not MaskSpelling.PACKED or batch.mask is None:
            return batch
        return replace(batch, mask=change(problem, batch, batch.mask.view(np.uint8)))

    return with_batch(oracle, other_lines)


@kernel_fault(FaultClass.MASK, *SHOWS, through=_reading_lines)
def packed_lines_are_those_of_uniform_rows(_: Problem, batch: Batch, lines: Lines) -> Lines:
    """The packed lines of a row are read as if every row had as many as the longest row."""
    most = int(batch.query_lens.max(initial=0))
    read = lines.copy()
    for row, span in enumerate(query_spans(batch)):
        read[span] = lines[(row * most + np.arange(span.stop - span.start)) % len(lines)]
    return read


@kernel_fault(FaultClass.MASK, *SHOWS, through=_reading_lines)
def packed_lines_are_as_wide_as_their_nodes(problem: Problem, _: Batch, lines: Lines) -> Lines:
    """Packed lines are read as if their stride were the bytes that the longest draft needs."""
    shape = len(lines), -(-problem.max_draft_tokens // 8)
    return lines.ravel()[: shape[0] * shape[1]].reshape(shape)


@kernel_fault(FaultClass.MASK, *SHOWS, through=_reading_lines)
def words_of_packed_lines_are_big_endian(_p: Problem, _b: Batch, lines: Lines) -> Lines:
    """The 32-bit words of packed lines are read as big-endian."""
    if lines.shape[1] % 4:
        return lines
    return lines.reshape(len(lines), -1, 4)[:, :, ::-1].reshape(lines.shape)


@kernel_fault(FaultClass.MASK, *SHOWS, through=_reading_lines)
def signed_bytes_fill_their_word(_p: Problem, _b: Batch, lines: Lines) -> Lines:
    """If a packed byte has its highest bit set, the higher bytes of its 32-bit word become 255."""
    filled = lines.copy()
    for byte in range(lines.shape[1]):
        if byte % 4:
            filled[filled[:, byte - 1] >= 128, byte] = 255
    return filled


@kernel_fault(
    FaultClass.MASK, *SHOWS, cites="TensorRT-LLM#13006", akin="TensorRT-LLM#13426", through=masked
)
def mask_lines_have_the_allocated_width(
    problem: Problem, batch: Batch, matrices: Matrices
) -> Matrices:
    """The lines of a QLEN mask are read with a stride of max_draft_tokens."""
    if problem.mask_spelling is not MaskSpelling.QLEN:
        return matrices
    sizes = batch.query_lens.astype(np.int64) ** 2
    starts = np.cumsum(sizes) - sizes
    flat, width = _flat(matrices), problem.max_draft_tokens
    return [
        _cells(flat, start + np.arange(n)[:, None] * width + np.arange(n))
        for start, n in zip(starts.tolist(), batch.query_lens.tolist(), strict=True)
    ]


@kernel_fault(FaultClass.MASK, *SHOWS, akin="TensorRT-LLM#13006", through=masked)
def full_mask_is_read_without_its_context(
    problem: Problem, batch: Batch, matrices: Matrices
) -> Matrices:
    """The lines of a FULL mask are read from their first column, without skipping the context."""
    if problem.mask_spelling is not MaskSpelling.FULL:
        return matrices
    read = []
    for matrix, seq_len in zip(matrices, batch.seq_lens.tolist(), strict=True):
        context = np.ones((len(matrix), max(seq_len - len(matrix), 0)), bool)
        read.append(np.hstack([context, matrix])[:, : len(matrix)])
    return read


def _packed(oracle: Oracle, change: Callable[[NDArray[np.bool_]], NDArray[np.bool_]]) -> Oracle:
    """Return an oracle in which the matrices of packed masks are changed."""

    def changed(problem: Problem, _b: Batch, matrices: Matrices) -> Matrices:
        packed = problem.mask_spelling is MaskSpelling.PACKED
        return [change(matrix) for matrix in matrices] if packed else matrices

    return masked(oracle, changed)


@kernel_fault(FaultClass.MASK, *SHOWS, akin="llguidance#330", through=_packed)
def packed_bits_are_big_endian(matrix: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The bits of a packed byte are read in reverse: bit 0 is the eighth node."""
    bits = np.packbits(matrix, axis=1, bitorder="little")
    return np.unpackbits(bits, axis=1)[:, : len(matrix)].astype(bool)


@kernel_fault(FaultClass.MASK, *SHOWS, cites="sglang#29450", through=masked)
def nodes_past_the_eighth_are_cut(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """A mask line has only 8 bits: no node sees nodes after the eighth."""
    return [matrix & (np.arange(len(matrix)) < 8) for matrix in matrices]


@kernel_fault(FaultClass.MASK, *SHOWS, cites="TensorRT-LLM#12962", akin="sglang@eagle_utils")
def packed_nodes_past_the_32nd_are_cut(oracle: Oracle) -> Oracle:
    """Only the first 32 bits of a packed line are read."""
    return _packed(oracle, lambda matrix: matrix & (np.arange(len(matrix)) < 32))


@kernel_fault(FaultClass.MASK, *SHOWS)
def sign_bits_of_packed_words_are_lost(oracle: Oracle) -> Oracle:
    """The highest bit of each 32-bit word is lost: no node sees nodes 31 and 63."""
    return _packed(oracle, lambda matrix: matrix & (np.arange(len(matrix)) % 32 != 31))


@kernel_fault(FaultClass.MASK, *SHOWS, through=masked)
def mask_shifts_wrap_at_32(problem: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """In bool masks, node numbers are taken modulo 32: a node that sees node 0 sees node 32."""
    if problem.mask_spelling is MaskSpelling.PACKED:
        return matrices
    return [matrix[:, np.arange(len(matrix)) % 32] for matrix in matrices]


@kernel_fault(FaultClass.MASK, *SHOWS, akin="TensorRT-LLM#12962", through=masked)
def nodes_past_the_64th_are_cut(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """A mask line has only 64 bits: no node sees nodes after the 64th."""
    return [matrix & (np.arange(len(matrix)) < 64) for matrix in matrices]


@kernel_fault(FaultClass.MASK, *SHOWS, akin="sglang#29587")
def mask_is_transposed(oracle: Oracle) -> Oracle:
    """The mask is transposed: nodes see their descendants instead of their ancestors."""
    return masked(oracle, lambda _p, _b, matrices: [matrix.T for matrix in matrices])


@kernel_fault(FaultClass.MASK, *SHOWS, akin="sglang#8409")
def ancestors_are_forgotten(oracle: Oracle) -> Oracle:
    """Nodes see only the context and themselves, not their ancestors."""
    return masked(oracle, lambda _p, _b, matrices: [np.eye(len(m), dtype=bool) for m in matrices])


@kernel_fault(FaultClass.MASK, *SHOWS)
def ancestors_past_the_eighth_are_forgotten(oracle: Oracle) -> Oracle:
    """Nodes see only the context, themselves and their seven nearest ancestors."""

    def nearest(matrix: Matrix) -> Matrix:
        counted = np.cumsum(matrix[:, ::-1], axis=1)[:, ::-1]  # the node itself is the first
        return matrix & (counted <= 8)

    return masked(oracle, lambda _p, _b, matrices: [nearest(matrix) for matrix in matrices])


@kernel_fault(FaultClass.MASK, *SHOWS, akin="TensorRT-LLM#13006", through=masked)
def every_row_takes_the_first_mask(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """Rows with as many nodes as the first row use its mask."""
    return [matrices[0] if m.shape == matrices[0].shape else m for m in matrices]


@kernel_fault(FaultClass.SIBLING, *SHOWS, cites="FastDeploy#3514 vllm#17560")
def trees_are_taken_for_chains(oracle: Oracle) -> Oracle:
    """Every node sees all earlier nodes, as in a chain."""
    return masked(
        oracle, lambda _p, _b, matrices: [np.tril(np.ones_like(matrix)) for matrix in matrices]
    )


@kernel_fault(FaultClass.SIBLING, *SHOWS, through=masked)
def a_chain_in_the_first_row_serves_all(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """If the tree of the first row is a chain, the trees of all rows are treated as chains."""
    chains = [np.tri(len(matrix), dtype=bool) for matrix in matrices]
    is_chain = bool(matrices) and np.array_equal(matrices[0], chains[0])
    return chains if is_chain else matrices


@kernel_fault(FaultClass.SIBLING, *SHOWS, akin="EAGLE#336", through=masked)
def the_node_before_is_seen(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """Every node also sees the node stored before it, which can be a sibling."""
    return [matrix | np.eye(len(matrix), k=-1, dtype=bool) for matrix in matrices]


@kernel_fault(FaultClass.SIBLING, *SHOWS, akin="EAGLE#336", through=masked)
def only_the_last_node_leaks(_p: Problem, _b: Batch, matrices: Matrices) -> Matrices:
    """The last node of a tree sees all other nodes."""
    leaky: list[NDArray[np.bool_]] = [matrix.copy() for matrix in matrices]
    for matrix in leaky:
        matrix[-1:] = True
    return leaky


@kernel_fault(FaultClass.POSITION, "S-3", cites="mlxcel#1214 TensorRT-LLM#13081")
def tree_positions_follow_the_index(oracle: Oracle) -> Oracle:
    """Positions in a tree follow the index of a node, so that siblings have different ones."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        return RIGHT.metadata(replace(problem, mask=Mask.CAUSAL), batch)

    return replace(oracle, metadata=metadata)
