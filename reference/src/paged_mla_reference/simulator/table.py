"""A schedule as text, one line per step."""

from __future__ import annotations

from collections.abc import Iterable

from paged_mla_reference.simulator.step import Row, Step


def schedule_table(steps: Iterable[Step]) -> str:
    """Return a header and one line per step: its padded shape, and each row's tokens and blocks."""
    lines = ["step  mask    rows  tokens  request: kind context+query @ blocks"]
    for step in steps:
        rows = " | ".join(map(_row, step.rows)) or "idle"
        lines.append(
            f"{step.number:>4}  {step.mask:<6}  {step.num_rows:>4}  {step.num_tokens:>6}  {rows}"
        )
    return "\n".join(lines)


def _row(row: Row) -> str:
    blocks = ",".join(map(str, row.blocks))
    return f"{row.request.id}: {row.kind} {row.context_len}+{row.query_len} @ {blocks}"
