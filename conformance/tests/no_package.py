"""A backend whose package is not installed."""

from __future__ import annotations

import a_package_nobody_has


def create() -> object:
    return a_package_nobody_has
