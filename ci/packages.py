"""The distributions of this repository, each after those that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Package:
    """One distribution: ``paged-mla-<name>`` to install, ``paged_mla_<name>`` to import.

    Parameters
    ----------
    name : str
    folder : str
        Where its ``pyproject.toml``, ``src`` and ``tests`` are, from the root.
    needs : tuple of str
        Names of the distributions to install before it.
    forbidden : tuple of str
        What may not be installed when its modules are imported alone.
    engines : tuple of str
        What some of its modules adapt to, and are imported by alone.
    """

    name: str
    folder: str
    needs: tuple[str, ...]
    forbidden: tuple[str, ...]
    engines: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """What is imported."""
        return f"paged_mla_{self.name}"

    @property
    def source(self) -> str:
        """Where that lies, from the root."""
        return f"{self.folder}/src"


_ALL = (
    Package(
        "shared",
        "shared",
        needs=(),
        forbidden=("torch", "triton", "pytest", "paged_mla_reference", "paged_mla_optimized"),
    ),
    Package(
        "reference",
        "reference",
        needs=("shared",),
        forbidden=("torch", "triton", "pytest", "paged_mla_optimized", "paged_mla_conformance"),
    ),
    Package(
        "optimized",
        "optimized",
        needs=("shared",),
        forbidden=("pytest", "paged_mla_reference", "paged_mla_conformance"),
        engines=("vllm", "transformers"),
    ),
    Package(
        "conformance",
        "conformance",
        needs=("shared", "reference"),
        forbidden=("torch", "triton", "paged_mla_optimized"),
    ),
    Package(
        "adapters",
        "conformance/adapters",
        needs=("shared", "reference", "conformance"),
        forbidden=("paged_mla_optimized",),
    ),
)
PACKAGES = {package.name: package for package in _ALL}
