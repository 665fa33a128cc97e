"""A backend whose device is not there."""

from __future__ import annotations

from paged_mla_shared.errors import Unsupported


def create() -> object:
    raise Unsupported("no such device")
