"""What a run puts to the test: a backend, where it runs, and in which terms it is asked."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from paged_mla_conformance.profile import Run
from paged_mla_shared.backend import Capabilities

_PACKAGES = ("numpy", "ml_dtypes", "torch", "triton", "pytest")


@dataclass(frozen=True)
class Subject:
    """A backend and a run's terms, as plain data.

    Parameters
    ----------
    factory : str
        Its name on the command line; until the backend is loaded, all that is known.
    name, version, mode, device : str
    capabilities : dict
    environment : dict of str to str
        Versions of what is in use.
    dims : str
    dtypes : list of str
    dtypes_left_out : list of str
        Core types of the mode that are not asked.
    profile : str
    """

    factory: str
    name: str = "unknown"
    version: str = "unknown"
    mode: str = "unknown"
    device: str = "unknown"
    capabilities: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    dims: str = "unknown"
    dtypes: list[str] = field(default_factory=list)
    dtypes_left_out: list[str] = field(default_factory=list)
    profile: str = "unknown"

    @classmethod
    def of(cls, run: Run) -> Subject:
        """Describe a run whose backend is loaded."""
        backend = run.backend
        return cls(
            factory=run.factory,
            name=backend.name,
            version=backend.version,
            mode=backend.mode,
            device=backend.device,
            capabilities=_plain(backend.capabilities),
            environment={"python": platform.python_version(), **versions()},
            dims=run.dims_name,
            dtypes=list(run.dtypes),
            dtypes_left_out=[d for d in run.core.dtypes if d not in run.dtypes],
            profile=run.profile.name,
        )

    @property
    def title(self) -> str:
        """Name everything that a verdict holds for."""
        if self.mode == "unknown":
            return self.factory
        return (
            f"{self.name} {self.version} in mode {self.mode} on {self.device}, "
            f"dims {self.dims}, {'/'.join(self.dtypes)}, profile {self.profile}"
        )


def versions() -> dict[str, str]:
    """Return the version of each package in use, which need not be the one installed."""
    found = {}
    for package in _PACKAGES:
        version = getattr(sys.modules.get(package), "__version__", None)
        if version is None:
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                version = "absent"
        found[package] = str(version)
    return found


def _plain(capabilities: Capabilities) -> dict[str, Any]:
    return {
        k: sorted(v) if isinstance(v, frozenset) else v for k, v in asdict(capabilities).items()
    }
