"""The import packages of this repository; each comes after the packages that it imports."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


def tracked(*patterns: str) -> list[str]:
    """Return the files that git tracks and that match a pattern, from the root; all without one."""
    command = ["git", "ls-files", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@dataclass(frozen=True)
class Package:
    """One import package.

    Parameters
    ----------
    name : str
        The name of the package in commands, for example in ``nox -s "tests(reference)"``.
    module : str
        The import name.
    folder : str
        The folder that contains ``tests``, from the root.
    source : str
        The folder that contains the module, from the root.
    extra : str
        The extras of the distribution that its tests need, separated by commas; "" for none.
    """

    name: str
    module: str
    folder: str
    source: str
    extra: str


def _package(name: str, folder: str, extra: str) -> Package:
    return Package(name, f"paged_mla_{name}", folder, f"{folder}/src", extra)


_ALL = (
    _package("shared", "shared", ""),
    _package("reference", "reference", ""),
    _package("optimized", "optimized", "optimized"),
    _package("conformance", "conformance", "conformance"),
    _package("adapters", "conformance/adapters", "conformance,optimized"),
    Package("facade", "paged_mla", ".", "src", "conformance,optimized"),
)
PACKAGES = {package.name: package for package in _ALL}
LONGEST_FIRST = ("conformance", "optimized", "adapters", "reference", "facade", "shared")
"""The order in which tests start, which keeps two cores busy until the end."""
EXTRAS = {  # by extra: the packages that it makes importable, and modules that it must not install
    "": (("shared", "reference", "facade"), ("torch", "triton", "pytest", "hypothesis")),
    "conformance": (("shared", "reference", "conformance", "facade"), ("torch", "triton")),
    "optimized": (("shared", "reference", "optimized", "facade"), ("pytest", "transformers")),
    "transformers": (("optimized",), ("pytest",)),
    "all": (tuple(PACKAGES), ("vllm", "sglang")),
}
