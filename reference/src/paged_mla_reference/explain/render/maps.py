"""Compute the numbers that the pictures of an explanation show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.errors import Errors, actual_output, errors_of
from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.query_view import QueryView, views_of_wrong
from paged_mla_reference.explain.checks.step import Step, is_valid
from paged_mla_reference.rules.cache import read_slots
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import context_lens, query_spans, used_blocks
from paged_mla_reference.rules.rounding import widen

MOST_LINES = 256  # of a picture
MOST_CELLS = 160  # of a line
LARGEST_SHARE = 1e12  # shown for NaN and infinite errors
_WRONG_QUERIES = 16
_BINS = 61


@dataclass
class Maps:
    """Numbers of the pictures; a list is empty if the dump lacks the data for it.

    Parameters
    ----------
    rows : list of str
        The name of each line of `by_head`: a row, several rows, or padding.
    by_head : list of list of float
        The largest error relative to its budget, for each row and head.
    queries : list of str
        The name of each line of `by_block`: a wrong query token and its row.
    by_block : list of list of float
        For each run of keys, the distance between the dump's output and the right output without
        these keys, relative to the distance from the right output. A value near 0 means that the
        dump's output lacks these keys.
    block_keys : int
        The number of keys of a cell of `by_block`.
    ulps : list of int
        A histogram of the errors of out, in units in the last place.
    ulp_edges : list of float
        The edges of the histogram's bins.
    owners : list of list of int
        For each block: its id, the number of rows that use it, the number of those rows that are
        wrong, and the first of the rows.
    mask : list of list of int
        The mask of the row `mask_row`: 0 not seen, 1 seen, 2 seen by a wrong query.
    mask_row, mask_keys, mask_first : int
        The row, the number of keys of a cell, and the first key shown.
    """

    rows: list[str] = field(default_factory=list)
    by_head: list[list[float]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    by_block: list[list[float]] = field(default_factory=list)
    block_keys: int = 0
    ulps: list[int] = field(default_factory=list)
    ulp_edges: list[float] = field(default_factory=list)
    owners: list[list[int]] = field(default_factory=list)
    mask: list[list[int]] = field(default_factory=list)
    mask_row: int = -1
    mask_keys: int = 1
    mask_first: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


def maps_of(found: Examination) -> Maps:
    """Return the numbers of all pictures that an examined dump allows."""
    maps, step = Maps(), found.step
    if step.batch is None:
        return maps
    errors = None if found.right is None else errors_of(step, found.right)
    if errors is not None:
        _draw_heads(maps, step, errors)
        _draw_ulps(maps, step, errors)
        _draw_key_blocks(maps, found)
    if is_valid(step):
        wrong = np.zeros(step.batch.num_tokens, bool)
        if errors is not None:
            wrong = np.asarray(errors.wrong.any(axis=1))
        _draw_owners(maps, step, wrong)
        _draw_mask(maps, step, wrong)
    return maps


def _draw_heads(maps: Maps, step: Step, errors: Errors) -> None:
    assert step.batch is not None
    share = np.minimum(np.maximum(errors.out_share, errors.lse_share), LARGEST_SHARE)
    spans = query_spans(step.batch)
    lines = [share[span].max(axis=0, initial=0.0) for span in spans]
    names = [f"row {row}" for row in range(len(spans))]
    padding = share[int(step.batch.cu_seqlens_q[-1]) :]
    if len(padding):
        lines.append(padding.max(axis=0))
        names.append("padding")
    together = max(-(-len(lines) // MOST_LINES), 1)
    for start in range(0, len(lines), together):
        some = np.array(lines[start : start + together])
        last = min(start + together, len(lines)) - 1
        maps.rows.append(names[start] if together == 1 else f"rows {start}-{last}")
        maps.by_head.append([float(f"{x:.3g}") for x in some.max(axis=0)])


def _draw_ulps(maps: Maps, step: Step, errors: Errors) -> None:
    if not step.has("out") or not errors.ulps.size:
        return
    size = np.sign(errors.ulps) * np.log2(1 + np.abs(errors.ulps))
    widest = max(4.0, float(np.ceil(np.abs(size).max())))
    counts, edges = np.histogram(size, _BINS, (-widest, widest))
    maps.ulps = counts.tolist()
    maps.ulp_edges = (np.sign(edges) * (np.exp2(np.abs(edges)) - 1)).round(3).tolist()


def _draw_key_blocks(maps: Maps, found: Examination) -> None:
    views = sorted(views_of_wrong(found, _WRONG_QUERIES), key=lambda view: view.token)
    if not views or not found.step.has("out"):
        return
    size = found.step.problem.block_size
    longest = max(len(view.seen) for view in views)
    maps.block_keys = size * max(1, -(-longest // (size * MOST_CELLS)))
    for view in views:
        line = _without_each(found, view, maps.block_keys)
        if line is not None:
            maps.queries.append(f"token {view.token}, row {view.row}")
            maps.by_block.append([float(f"{x:.3g}") for x in line])


def _without_each(found: Examination, view: QueryView, width: int) -> NDArray[np.float64] | None:
    """Return a line of ``Maps.by_block``; ``None`` if values are not finite."""
    step, right = found.step, found.right
    assert right is not None
    assert step.batch is not None
    assert step.after is not None
    actual = widen(actual_output(step, right.exact.output("float32")).out[view.token])
    if not np.isfinite(actual).all() or not np.isfinite(view.lse).all():
        return None
    keys = np.flatnonzero(view.seen)
    block = step.batch.block_table[view.row, keys // step.problem.block_size].astype(np.int64)
    slots = block * step.problem.block_size + keys % step.problem.block_size
    values = widen(read_slots(step.after, slots)[0])  # [K, R]
    shares = view.shares[:, keys]  # [H, K]
    exact = right.exact.out[view.token]
    far = max(float(np.linalg.norm(actual - exact)), 1e-300)
    line = np.full(-(-len(view.seen) // width), 1.0)
    for cell in np.unique(keys // width).tolist():
        inside = keys // width == cell
        weight = np.minimum(shares[:, inside].sum(axis=1, keepdims=True), 1 - 1e-9)
        rest = (exact - shares[:, inside] @ values[inside]) / (1 - weight)
        line[cell] = min(float(np.linalg.norm(actual - rest)) / far, 10.0)
    return line


def _draw_owners(maps: Maps, step: Step, wrong: NDArray[np.bool_]) -> None:
    batch, size = step.batch, step.problem.block_size
    assert batch is not None
    if not step.has("block_table"):
        return
    users: dict[int, list[int]] = {}
    for row in range(batch.num_rows):
        bad = bool(wrong[query_spans(batch)[row]].any())
        for block in used_blocks(batch, row, size).tolist():
            entry = users.setdefault(block, [0, 0, row])
            entry[0] += 1
            entry[1] += bad
    most = MOST_LINES * MOST_CELLS
    maps.owners = [[block, *entry] for block, entry in sorted(users.items())[:most]]


def _draw_mask(maps: Maps, step: Step, wrong: NDArray[np.bool_]) -> None:
    """Draw the mask of the first row with a wrong query, or of the row with most queries."""
    batch = step.batch
    assert batch is not None
    live = np.flatnonzero(batch.seq_lens > 0)
    if not live.size:
        return
    spans = query_spans(batch)
    with_wrong = [row for row in live.tolist() if wrong[spans[row]].any()]
    row = with_wrong[0] if with_wrong else int(live[np.argmax(batch.query_lens[live])])
    seen = visibility(step.problem, batch)[row]
    first = max(0, int(context_lens(batch)[row]) - 16) if seen.shape[1] > MOST_CELLS else 0
    shown = seen[:MOST_LINES, first:]
    together = max(1, -(-shown.shape[1] // MOST_CELLS))
    cells = -(-shown.shape[1] // together)
    padded = np.zeros((len(shown), cells * together), bool)
    padded[:, : shown.shape[1]] = shown
    drawn = padded.reshape(len(shown), cells, together).any(axis=2).astype(int)
    drawn[wrong[spans[row]][: len(shown)]] *= 2
    maps.mask, maps.mask_row = drawn.tolist(), row
    maps.mask_keys, maps.mask_first = together, first
