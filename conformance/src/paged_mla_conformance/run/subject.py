"""The subject of a run: the backend, the machine, the dims, the dtypes and the profile."""

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
from paged_mla_shared.dims import PRESETS

NOT_LOADED = "not loaded"
"""The value in a report for a property of a backend that could not be loaded."""
_PACKAGES = ("numpy", "ml_dtypes", "torch", "triton", "pytest")


def machine() -> dict[str, str]:
    """Return the operating system and the processor with its number of cores."""
    return {
        "system": platform.platform(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
    }


def _processor() -> str:
    """Return the processor's model, or its architecture where Linux does not report the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, models), platform.machine())


@dataclass(frozen=True)
class Subject:
    """A backend and the settings of a run, as plain data.

    Parameters
    ----------
    factory : str
        The value of ``--backend``. The other fields are set when the backend is loaded.
    name, version, mode, device : str
        Attributes of the backend.
    capabilities : dict
        Fields of the backend's ``Capabilities``; sets are sorted lists.
    environment : dict of str to str
        The operating system, the processor and the versions of the packages in use.
    dims : str
        The name of the model dims.
    dtypes : list of str
        Element types of this run.
    dtypes_left_out : list of str
        Core element types of the mode that this run does not test.
    profile : str
        The name of the profile.
    has_surroundings : bool
        Whether ``PAGED_MLA_SURROUNDINGS`` chooses the surroundings of the backend's calls.
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
        """Return the subject of a run whose backend is loaded."""
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
    def head_dims_left_out(self) -> dict[tuple[int, int], str]:
        """Each declared (R, P) that the run does not test, with a preset that has it, or ""."""
        here = PRESETS.get(self.dims)
        declared = {(latent, rotated) for latent, rotated in self.capabilities.get("head_dims", ())}
        names: dict[tuple[int, int], str] = {}
        for name, dims in PRESETS.items():
            names.setdefault((dims.kv_lora_rank, dims.qk_rope_head_dim), name)
        mine = here and (here.kv_lora_rank, here.qk_rope_head_dim)
        return {sizes: names.get(sizes, "") for sizes in sorted(declared - {mine})}

    @property
    def title(self) -> str:
        """The backend, mode, device, dims, dtypes and profile for which a verdict holds."""
        if self.mode == NOT_LOADED:
            return self.factory
        return (
            f"{self.name} {self.version} in mode {self.mode} on {self.device}, "
            f"dims {self.dims}, {'/'.join(self.dtypes)}, profile {self.profile}"
        )


def versions() -> dict[str, str]:
    """Return the version of each package: of the imported module, else of the installed package.

    A package that is neither imported nor installed has the version "absent".
    """
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
