"""Build the wheel and check its files.

The wheel contains every module of every package, ``py.typed``, the license and the metadata that
package indexes show. It does not contain development tools, tests and reports of benchmarks. Only
one file contains the version.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from ci.packages import PACKAGES, ROOT

REQUIRED = ("License-Expression", "License-File", "Keywords", "Classifier", "Requires-Python")
LABORATORY = re.compile(r"/(tools|explained|tests|bench/reports)/")
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Return 0 if the wheel contains the right files and metadata, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m ci.check_wheels", description=__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="the folder for the wheel")
    folder = parser.parse_args(arguments).folder
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder]
    command += ["--build-constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*command, str(ROOT)], check=True)
    [wheel] = Path(folder).glob("paged_mla-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {member: archive.read(member) for member in archive.namelist()}
    faults = faults_of(found)
    lines = sum(text.count(b"\n") for name, text in found.items() if name.endswith(".py"))
    size = f"{wheel.stat().st_size / 2**20:.1f} MiB, {lines:,} lines of Python"
    print("\n".join(faults) or f"{wheel.name}: {size}, nothing missing")
    return 1 if faults else 0


def faults_of(found: dict[str, bytes]) -> list[str]:
    """Return the faults of a wheel, one line each.

    Parameters
    ----------
    found : dict of str to bytes
        The contents of the wheel's files by their paths.
    """
    wanted = {"paged_mla/py.typed"}
    for package in PACKAGES.values():
        source = ROOT / package.source
        files = [path for path in (source / package.module).rglob("*") if path.is_file()]
        names = {str(p.relative_to(source)) for p in files if "__pycache__" not in p.parts}
        wanted |= {name for name in names if not LABORATORY.search(f"/{name}")}
        wanted.add(f"{package.module}/py.typed")
    faults = [f"missing from the wheel: {name}" for name in sorted(wanted - found.keys())]
    faults += [
        f"must not be in the wheel: {name}" for name in found if LABORATORY.search(f"/{name}")
    ]
    [info] = {member.partition("/")[0] for member in found if ".dist-info/" in member}
    if found.get(f"{info}/licenses/LICENSE") != (ROOT / "LICENSE").read_bytes():
        faults.append("the LICENSE of the wheel differs from that of the project")
    metadata = email.message_from_bytes(found[f"{info}/METADATA"])
    faults += [f"the metadata has no {field}" for field in REQUIRED if field not in metadata]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]
    written = [name for name, text in found.items() if VERSION.search(text.decode(errors="ignore"))]
    if written != [project["path"].removeprefix("shared/src/")]:
        faults.append(f"the version must be in one file, but is in {written}")
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
