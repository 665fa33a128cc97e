"""What tests need beside this project: skipped where it is not installed, and only there."""

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
    """Return a module, or skip the test whose subject is not installed.

    Unlike ``pytest.importorskip``, a package that is installed and cannot be imported, as for
    want of a dependency, is an error: nothing of it would be tested, and the run would be green.

    Parameters
    ----------
    name : str
        A module; it is its package that may be absent.
    module_level : bool
        The whole file is skipped.
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
