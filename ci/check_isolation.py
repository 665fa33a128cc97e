"""Import every module of one installed distribution; forbidden packages must be absent.

Adapters wait for their engine: ``nox -s engines`` imports them.

Usage: ``python -m ci.check_isolation NAME``, as in ``ci/packages.py``
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys

from ci.packages import PACKAGES, Package


def main(package: Package) -> int:
    """Return 0 when every module imports and nothing forbidden is there."""
    present = [name for name in package.forbidden if importlib.util.find_spec(name)]
    if present:
        print(f"{package.name}: {present} should not be installed beside it")
        return 1
    os.environ.setdefault("TRITON_INTERPRET", "1")
    root = importlib.import_module(package.module)
    names = [m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
    waiting = [name for name in names if not _imports(name, package)]
    print(f"{package.name}: {len(names) - len(waiting)} modules import alone")
    if waiting:
        print(f"{package.name}: {waiting} wait for an engine")
    return 0


def _imports(name: str, package: Package) -> bool:
    """Import a module; return False where it is for an engine that is not there."""
    if name.endswith("__main__"):
        return True
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in package.engines:
            return False
        raise
    return True


if __name__ == "__main__":
    sys.exit(main(PACKAGES[sys.argv[1]]))
