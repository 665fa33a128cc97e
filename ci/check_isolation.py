"""Import every module of one installed distribution; forbidden packages must be absent.

Usage: ``python ci/check_isolation.py shared|reference|optimized|conformance``
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys

FORBIDDEN = {
    "shared": ("torch", "triton", "pytest", "paged_mla_reference", "paged_mla_optimized"),
    "reference": ("torch", "triton", "pytest", "paged_mla_optimized", "paged_mla_conformance"),
    "optimized": ("pytest", "paged_mla_reference", "paged_mla_conformance"),
    "conformance": ("torch", "triton", "paged_mla_optimized"),
}


def main(package: str) -> int:
    """Return 0 when every module imports and nothing forbidden is there."""
    present = [name for name in FORBIDDEN[package] if importlib.util.find_spec(name)]
    if present:
        print(f"{package}: {present} should not be installed beside it")
        return 1
    os.environ.setdefault("TRITON_INTERPRET", "1")
    root = importlib.import_module(f"paged_mla_{package}")
    names = [m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    print(f"{package}: {len(names)} modules import alone")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
