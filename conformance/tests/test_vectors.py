"""The stored vectors are what the reference gives."""

from __future__ import annotations

from paged_mla_conformance.meta.vectors import stale_vectors


def test_no_vector_is_stale():
    """S-5: a rule that changes must change its vectors in the same commit."""
    assert stale_vectors() == []
