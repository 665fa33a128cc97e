"""Each distribution is built once, and its wheel holds what a stranger needs of it.

Every file of its package, ``py.typed`` and the license are in the wheel; its metadata name the
license, keywords and classifiers; and its README, which becomes the description, links nothing
outside of the distribution.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ci.packages import PACKAGES, ROOT, Package

REQUIRED = ("License-Expression", "License-File", "Keywords", "Classifier", "Requires-Python")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def main() -> int:
    """Return 0 when nothing is missing from any wheel."""
    faults = [fault for package in PACKAGES.values() for fault in faults_of(package)]
    print("\n".join(faults) or f"{len(PACKAGES)} wheels, nothing missing")
    return 1 if faults else 0


def faults_of(package: Package) -> list[str]:
    """Return what is wrong with one distribution, one phrase each."""
    folder, name = ROOT / package.folder, package.module
    with tempfile.TemporaryDirectory() as built:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", built]
        subprocess.run([*command, str(folder)], check=True)
        [wheel] = Path(built).glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            found = {member: archive.read(member) for member in archive.namelist()}
    [info] = {member.partition("/")[0] for member in found if ".dist-info/" in member}
    source = ROOT / package.source
    files = [path for path in (source / name).rglob("*") if path.is_file()]
    wanted = {str(p.relative_to(source)) for p in files if "__pycache__" not in p.parts}
    faults = [f"not in the wheel: {file}" for file in sorted(wanted - found.keys())]
    faults += [f"no {file}" for file in {f"{name}/py.typed"} - found.keys()]
    if found.get(f"{info}/licenses/LICENSE") != (ROOT / "LICENSE").read_bytes():
        faults.append("its LICENSE is not that of the project")
    metadata = email.message_from_bytes(found[f"{info}/METADATA"])
    faults += [f"no {field} in its metadata" for field in REQUIRED if field not in metadata]
    for target in LINK.findall((folder / "README.md").read_text()):
        if not (folder / target).resolve().is_relative_to(folder):
            faults.append(f"README.md links {target}, outside of the distribution")
    return [f"{package.name}: {fault}" for fault in faults]


if __name__ == "__main__":
    sys.exit(main())
