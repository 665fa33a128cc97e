"""Import the names of a package when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def import_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Import a name and set it in its package; a package calls this from ``__getattr__``.

    Parameters
    ----------
    package : str
        The package that exports the name; it is already imported.
    homes : mapping of str to str
        The module that defines each name.
    name : str

    Raises
    ------
    AttributeError
        The package does not export the name.
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    setattr(sys.modules[package], name, value)
    return value
