"""The order of a step's rows, and the shape to which the step is padded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from paged_mla_reference.simulator.config import EngineConfig, RowOrder
from paged_mla_reference.simulator.step import Kind, Row, Step
from paged_mla_shared.problem import Mask


def arrange(config: EngineConfig, number: int, rows: Sequence[Row], mask: Mask) -> Step:
    """Order the rows and pad them to the graph that runs them (S-17).

    A step with a prefill row is not padded. Any other step is padded to the rows of its bucket. If
    this adds rows, the step is also padded to as many tokens per row as its longest row has. An
    idle step has only padded rows.
    """
    ordered = _ordered(config.order, rows)
    tokens = sum(row.query_len for row in ordered)
    num_rows = config.bucket(max(len(ordered), 1))
    if any(row.kind is Kind.PREFILL for row in ordered):
        num_rows = len(ordered)
    elif num_rows > len(ordered):
        tokens = num_rows * max((row.query_len for row in ordered), default=1)
    return Step(number, mask, ordered, num_rows, tokens, config.padded_query_len)


def _ordered(order: RowOrder, rows: Sequence[Row]) -> tuple[Row, ...]:
    if order is RowOrder.AS_ARRIVED:
        return tuple(rows)
    prefill = [row for row in rows if row.kind is Kind.PREFILL]
    others = [row for row in rows if row.kind is not Kind.PREFILL]
    if order is RowOrder.DECODE_FIRST:
        return (*others, *prefill)
    in_turn = chain.from_iterable(zip_longest(prefill, others))
    return tuple(row for row in in_turn if row is not None)
