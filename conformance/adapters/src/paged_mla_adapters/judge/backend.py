"""A backend of the suite that runs a judged function as its claims describe it."""

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
    """A :class:`paged_mla_shared.backend.Backend` that runs a judged function.

    Parameters
    ----------
    where : {"cuda", "cpu"}
        The device on which the function runs.
    """

    where: str = "cpu"

    @property
    def mode(self) -> str:
        """The mode in which the function runs: "gpu", "cpu" or "interpreter"."""
        return mode_on(self.where)

    @property
    def device(self) -> str:
        """The name of the device."""
        names = {"cpu": "CPU", "interpreter": "Triton interpreter (CPU)"}
        return names.get(self.mode) or torch.cuda.get_device_name()

    @property
    def judged(self) -> JudgedKernel:
        """The judged function."""
        assert isinstance(self.kernel, JudgedKernel)
        return self.kernel


def mode_on(device: str) -> str:
    """Return the mode of a function that runs on "cuda" or "cpu"."""
    if device == "cuda":
        return "gpu"
    return "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"


def create(path: Path) -> JudgedBackend:
    """Return a backend for the function of a claims file.

    Parameters
    ----------
    path : Path

    Raises
    ------
    InvalidArgument
        The file cannot be read or is not a claims file, or its function does not exist.
    Unsupported
        The file has ``device = "cuda"``, and no CUDA device is available.
    """
    return backend_of(read(path))


def backend_of(claims: Claims) -> JudgedBackend:
    """Return a backend for the function that the claims describe.

    Raises
    ------
    InvalidArgument
        The function does not exist.
    Unsupported
        The claims have ``device = "cuda"``, and no CUDA device is available.
    """
    if claims.device == "cuda" and not torch.cuda.is_available():
        raise Unsupported('the claims have device = "cuda", but no CUDA device is available')
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


@functools.cache  # the search takes a second if hundreds of packages are installed
def _version(target: str) -> str:
    """Return the version of the installed package that contains a target.

    For a target outside an installed package the result is "of this folder".
    """
    top = target.partition(":")[0].partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, []):
        return importlib.metadata.version(distribution)
    return "of this folder"
