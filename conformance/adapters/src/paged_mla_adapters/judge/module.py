"""The import of a Python file by its path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(name: str, path: Path) -> ModuleType:
    """Return the module `name`, which the first call imports from `path`.

    Errors of the import are passed on.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton and dataclasses look up a module by its name
    sys.path.insert(0, str(path.parent.resolve()))  # the file may import others of its folder
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
