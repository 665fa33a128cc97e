"""Import every module of one installed distribution; forbidden packages must be absent.

Adapters are left out: each needs its engine, and ``nox -s engines`` imports them.

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
    names = [
        module.name
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")
        if not module.name.startswith(f"{root.__name__}.engines.")
    ]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(f"{package.name}: {len(names)} modules import alone")
    return 0


if __name__ == "__main__":
    sys.exit(main(PACKAGES[sys.argv[1]]))
