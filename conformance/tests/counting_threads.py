"""A backend whose version is the number of threads that it may use."""

from __future__ import annotations

import os

from paged_mla_reference.backend import ReferenceBackend


def create() -> ReferenceBackend:
    return ReferenceBackend(version=os.environ.get("OMP_NUM_THREADS", "any"))
