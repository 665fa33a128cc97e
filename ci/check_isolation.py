"""Import every module of the installed wheel that works with one of its extras."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import pkgutil
import sys

from ci.packages import EXTRAS, PACKAGES, ROOT

ENGINES = {"vllm", "sglang", "transformers"}  # `nox -s engines` imports the modules for them


def main(arguments: list[str]) -> int:
    """Return 0 if every module can be imported and no unneeded package is installed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m ci.check_isolation", description=__doc__)
    parser.add_argument(
        "extra", choices=EXTRAS, metavar="EXTRA", help='"" for the distribution without an extra'
    )
    extra = parser.parse_args(arguments).extra
    names, absent = EXTRAS[extra]
    present = [name for name in absent if importlib.util.find_spec(name)]
    if present:
        print(f"[{extra}] installs {present}, which it must not need")
        return 1
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in names:
        root = importlib.import_module(PACKAGES[name].module)
        place = str(root.__file__)
        if place.startswith(str(ROOT)) and "site-packages" not in place:
            print(f"{root.__name__} comes from {place} and not from the wheel")
            return 1
        modules = [m.name for m in pkgutil.walk_packages(root.__path__, f"{root.__name__}.")]
        waiting = [module for module in modules if not _imports(module)]
        print(f"[{extra}] {name}: {len(modules) - len(waiting)} modules import", end="")
        print(f", {len(waiting)} need an engine" if waiting else "")
    return 0


def _imports(name: str) -> bool:
    """Import a module; return False if it needs an engine that is not installed."""
    if name.endswith("__main__"):
        return True
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ENGINES:
            return False
        raise
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
