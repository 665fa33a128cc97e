"""The import packages of this repository, each after those that it imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Package:
    """One import package.

    Parameters
    ----------
    name : str
        What it is called in commands, as in ``nox -s "tests(reference)"``.
    module : str
        What is imported.
    folder : str
        Where its ``tests`` are, from the root.
    source : str
        Where the module is, from the root.
    extra : str
        The extras of the distribution that bring what its tests need; "" for none.
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
"""The order in which tests start, so that two cores are busy until the end."""
EXTRAS = {  # with each extra of the distribution: packages that import, and what stays absent
    "": (("shared", "reference", "facade"), ("torch", "triton", "pytest", "hypothesis")),
    "conformance": (("shared", "reference", "conformance", "facade"), ("torch", "triton")),
    "optimized": (("shared", "reference", "optimized", "facade"), ("pytest", "transformers")),
    "transformers": (("optimized",), ("pytest",)),
    "all": (tuple(PACKAGES), ("vllm", "sglang")),
}
