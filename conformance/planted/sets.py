"""The planted bugs by set and name, and the backends that have them."""

from __future__ import annotations

import re
from functools import partial
from types import ModuleType

from planted import bugs, bugs_again, bugs_fifth, bugs_fourth, bugs_third
from planted.torch_backend import TorchBackend, TorchRunner


def _by_name(module: ModuleType) -> dict[str, type[TorchRunner]]:
    return {
        re.sub("(?<!^)(?=[A-Z])", "-", bug.__name__).lower(): bug
        for bug in TorchRunner.__subclasses__()
        if bug.__module__ == module.__name__
    }


SETS = {
    "first": _by_name(bugs),
    "second": _by_name(bugs_again),
    "third": _by_name(bugs_third),
    "fourth": _by_name(bugs_fourth),
    "fifth": _by_name(bugs_fifth),
}
BUGS = {name: bug for found in SETS.values() for name, bug in found.items()}


def __getattr__(name: str) -> partial[TorchBackend]:
    """Return the factory of the backend with the bug `name`."""
    if name not in BUGS:
        raise AttributeError(name)
    return partial(TorchBackend, BUGS[name])
