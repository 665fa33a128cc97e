"""What a run puts to the test: a backend, where it runs, and in which terms it is asked."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paged_mla_conformance.suite.selection.core import Run
from paged_mla_shared.backend import Capabilities

NOT_LOADED = "not loaded"
"""What a report says of a backend that never came as far as to say it itself."""
_PACKAGES = ("numpy", "ml_dtypes", "torch", "triton", "pytest")


def machine() -> dict[str, str]:
    """Return the processor and the operating system."""
    return {
        "system": platform.platform(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
    }


def _processor() -> str:
    """Return the model of the processor where Linux says it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, models), platform.machine())


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
        The machine, its operating system, and the versions of what is in use.
    dims : str
    dtypes : list of str
    dtypes_left_out : list of str
        Core types of the mode that are not asked.
    profile : str
    has_surroundings : bool
        Whether ``PAGED_MLA_SURROUNDINGS`` sets what surrounds the calls of the backend.
    """

    factory: str
    name: str = NOT_LOADED
    version: str = NOT_LOADED
    mode: str = NOT_LOADED
    device: str = NOT_LOADED
    capabilities: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=machine)
    dims: str = NOT_LOADED
    dtypes: list[str] = field(default_factory=list)
    dtypes_left_out: list[str] = field(default_factory=list)
    profile: str = NOT_LOADED
    has_surroundings: bool = False

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
            environment={**machine(), "python": platform.python_version(), **versions()},
            dims=run.dims_name,
            dtypes=list(run.dtypes),
            dtypes_left_out=[d for d in run.core.dtypes if d not in run.dtypes],
            profile=run.profile.name,
            has_surroundings=getattr(backend, "has_surroundings", False),
        )

    @property
    def title(self) -> str:
        """Name everything that a verdict holds for."""
        if self.mode == NOT_LOADED:
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
