"""A function with its claims as a backend of the suite."""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paged_mla_adapters.arrays import to_numpy
from paged_mla_adapters.judge.append_arguments import Written
from paged_mla_adapters.judge.claims import Claims, read
from paged_mla_adapters.judge.kernel import JudgedKernel
from paged_mla_adapters.kernel import KernelBackend, KernelRunner
from paged_mla_adapters.surroundings.calls import Room
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.problem import Batch, Output, Problem


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

    def prepare(self, problem: Problem) -> KernelRunner:
        """Build a runner that calls the function for what it does; raises ``Unsupported``."""
        if unmet := self.capabilities.unmet(problem, (), ()):
            raise Unsupported("; ".join(unmet))
        mixed = "mixed" in self.capabilities.features
        kind = {"append": Writer, "merge": Merger}.get(self.judged.claims.kind, KernelRunner)
        return kind(problem, self.kernel, self.where, mixed=mixed)


class Writer(KernelRunner):
    """A runner whose tokens the judged function writes."""

    _kernel: JudgedKernel

    def append(self, batch: Batch) -> None:
        """Let the function store rows where the reference would put them."""
        slots = batch.slot_mapping
        slots = self.plan(batch).slot_mapping if slots is None else slots
        if len(slots) == 0:
            return
        cache = self._cache()
        cache = cache.view(torch.float8_e4m3fn) if self._is_fp8 else cache

        def launch(given: Mapping[str, torch.Tensor], _room: Room) -> None:
            self._kernel.append(Written(problem=self._problem, cache=cache, **given))

        inputs = {"ckv": batch.ckv, "k_pe": batch.k_pe, "slot_mapping": slots}
        placed = {name: self._tensor(array) for name, array in inputs.items()}
        self._surroundings.run("append", launch, placed)


class Merger(KernelRunner):
    """A runner whose partial answers the judged function merges."""

    _kernel: JudgedKernel

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge them two by two, from the first on."""
        pairs = [(self._tensor(part.out), self._tensor(part.lse)) for part in partials]
        merged = (
            pairs[0] if len(pairs) > 1 else self._kernel.merge(pairs[0], self._nothing(pairs[0]))
        )
        for pair in pairs[1:]:
            merged = self._kernel.merge(merged, pair)
        return Output(to_numpy(merged[0]), to_numpy(merged[1]))

    @staticmethod
    def _nothing(like: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a partial answer over no keys."""
        return torch.zeros_like(like[0]), torch.full_like(like[1], -torch.inf)


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
    return JudgedBackend(
        name=claims.target,
        version=_version(claims.target),
        kernel=JudgedKernel(claims),
        capabilities=claims.capabilities,
        where=claims.device,
    )


@functools.cache  # where hundreds of packages are installed it takes a second
def _version(target: str) -> str:
    """Return the version of the installed package that a target is of, if there is one."""
    top = target.partition(":")[0].partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, []):
        return importlib.metadata.version(distribution)
    return "of this folder"
