"""A backend whose device does not exist."""

from __future__ import annotations

from paged_mla_shared.errors import Unsupported


def create() -> object:
    raise Unsupported("no such device")
