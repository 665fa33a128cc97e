"""The stored vectors equal those that the reference computes."""

from __future__ import annotations

from paged_mla_conformance.meta.vectors import stale_vectors


def test_no_vector_is_stale():
    """S-5: a commit that changes a rule must also change its vectors."""
    assert stale_vectors() == []
