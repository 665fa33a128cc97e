"""The changes that the outputs of a step make to the requests that ran."""

from __future__ import annotations

from paged_mla_reference.simulator.sequence import Sequence
from paged_mla_reference.simulator.speculation import accepted_path
from paged_mla_reference.simulator.step import Kind, Row


def commit(seq: Sequence, row: Row) -> list[int]:
    """Update a request with the sampled outputs of its row; return the accepted drafts.

    Accepted drafts of a chain are in their own slots. Accepted drafts of a tree are in the slots of
    their nodes. So only the root of a tree counts as computed, and a window writes the other
    accepted tokens again (S-16). A row of the kind ``DRAFT`` does not change its request.

    Returns
    -------
    list of int
        The numbers of the accepted query tokens in the row; empty if the row has no drafts.
    """
    accepted: list[int] = []
    if row.kind is Kind.PREFILL:
        seq.computed += row.query_len
        if not seq.prefilling:
            seq.reveal(1)
    elif row.kind in {Kind.DECODE, Kind.WINDOW}:
        seq.computed = seq.known
        seq.window_due = False
        seq.reveal(1)
    elif row.kind in {Kind.VERIFY, Kind.TREE}:
        parents = row.parents or range(-1, row.query_len - 1)
        accepted = accepted_path(row.tokens, parents, seq.truth(row.query_len))
        seq.computed += 1 if row.kind is Kind.TREE else 1 + len(accepted)
        seq.reveal(len(accepted) + 1)
        seq.window_due = row.kind is Kind.TREE
    return accepted
