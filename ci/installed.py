"""Imports of optional packages by tests, which are skipped only if a package is not installed."""

from __future__ import annotations

import importlib
import os
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Any

import pytest

DEMANDED = "PAGED_MLA_TESTS_NEED"
"""The environment variable that names packages whose absence is an error, not a skip."""


def import_or_skip(name: str, *, module_level: bool = False) -> Any:
    """Return a module, or skip the test if its package is not installed.

    Unlike with ``pytest.importorskip``, an installed package that cannot be imported is an error.
    Otherwise a run would pass although it does not test the package.

    Parameters
    ----------
    name : str
        The name of the module. Its top-level package may be missing.
    module_level : bool
        Whether to skip the whole file.

    Raises
    ------
    ImportError
        The package is installed or listed in :data:`DEMANDED`, but the import fails.
    """
    package = name.partition(".")[0]
    if package not in os.environ.get(DEMANDED, "").split() and not _is_installed(package):
        pytest.skip(f"{package} is not installed", allow_module_level=module_level)
    return importlib.import_module(name)


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return find_spec(package) is not None
    return True
