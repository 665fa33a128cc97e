"""The distributions carry one version, and pin each other to it."""

from __future__ import annotations

import re
import sys
import tomllib

from ci.packages import PACKAGES, ROOT


def main() -> int:
    """Return 0 when all versions agree."""
    found: dict[str, str] = {}
    for package in PACKAGES.values():
        file = f"{package.folder}/pyproject.toml"
        project = tomllib.loads((ROOT / file).read_text())["project"]
        found[file] = project["version"]
        for requirement in project["dependencies"]:
            if requirement.startswith("paged-mla-"):
                name, _, version = requirement.partition("==")
                found[f"{package.name} on {name}"] = version
        init = ROOT / package.source / package.module / "__init__.py"
        match = re.search(r'^__version__ = "(.+)"$', init.read_text(), re.MULTILINE)
        found[str(init.relative_to(ROOT))] = match[1] if match else "missing"
    if len(set(found.values())) == 1:
        return 0
    for place, version in found.items():
        print(f"{version:10} {place}")
    print("versions differ")
    return 1


if __name__ == "__main__":
    sys.exit(main())
