"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def import_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Import a name, and keep it in the package that offers it; for its ``__getattr__``.

    Parameters
    ----------
    package : str
        The package that offers the name; it is imported already.
    homes : mapping of str to str
        The module that defines each name.
    name : str

    Raises
    ------
    AttributeError
        The package does not offer the name.
    """
    home = homes.get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    setattr(sys.modules[package], name, value)
    return value
