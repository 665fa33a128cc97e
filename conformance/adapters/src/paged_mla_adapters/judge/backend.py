"""A function with its claims as a backend of the suite."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from paged_mla_adapters.judge.claims import Claims, read
from paged_mla_adapters.judge.kernel import JudgedKernel
from paged_mla_adapters.kernel import KernelBackend
from paged_mla_shared.errors import Unsupported


@dataclass(frozen=True)
class JudgedBackend(KernelBackend):
    """See :class:`paged_mla_shared.backend.Backend`; it runs where the claims say."""

    where: str = "cpu"

    @property
    def mode(self) -> str:
        """What the function runs on."""
        return mode_on(self.where)

    @property
    def device(self) -> str:
        """Name of the device."""
        names = {"cpu": "CPU", "interpreter": "Triton interpreter (CPU)"}
        return names.get(self.mode) or torch.cuda.get_device_name()

    @property
    def judged(self) -> JudgedKernel:
        """The function."""
        assert isinstance(self.kernel, JudgedKernel)
        return self.kernel


def mode_on(device: str) -> str:
    """Return the mode of a function that runs on "cuda" or "cpu"."""
    if device == "cuda":
        return "gpu"
    return "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


def create(path: Path) -> JudgedBackend:
    """Return the function of a claims file as a backend.

    Parameters
    ----------
    path : Path

    Raises
    ------
    InvalidArgument
        The file cannot be read, or says what no claims say.
    Unsupported
        It says ``device = "cuda"``, and there is no CUDA device.
    """
    return backend_of(read(path))


def backend_of(claims: Claims) -> JudgedBackend:
    """Return a function as a backend.

    Raises
    ------
    Unsupported
        It runs on a CUDA device, and there is none.
    """
    if claims.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported('claims say device = "cuda", and there is no CUDA device')
    judged = JudgedKernel(claims)
    return JudgedBackend(
        name=claims.target,
        version=_version(claims.target),
        kernel=judged,
        capabilities=claims.capabilities,
        append=judged.append if claims.kind == "append" else None,
        merge=judged.merge if claims.kind == "merge" else None,
        where=claims.device,
    )


@functools.cache  # where hundreds of packages are installed it takes a second
def _version(target: str) -> str:
    """Return the version of the installed package that a target is of, if there is one."""
    top = target.partition(":")[0].partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, []):
        return importlib.metadata.version(distribution)
    return "of this folder"
