"""A backend that an adapter makes from a kernel.

The reference computes the operations without a kernel: it always plans, and it writes to the cache
unless there is a writer. The suite can therefore run the groups that write before they read on a
kernel that only reads the cache. Such a run tests the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paged_mla_adapters.call import AppendCall, Call, MergeCall, PageLists
from paged_mla_adapters.declared import mode
from paged_mla_adapters.runner import Answers, KernelRunner
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Problem

Kernel = Callable[[Call], Answers]


@dataclass(frozen=True)
class KernelBackend:
    """A backend of the suite that runs a kernel.

    Parameters
    ----------
    name, version : str
    kernel : callable
        Takes a :class:`Call` and returns out [T, H, R] and lse [T, H].
    capabilities : Capabilities
    append : callable or None
        Takes an :class:`AppendCall` and writes its tokens to the cache. With ``None`` the reference
        writes them.
    merge : callable or None
        Takes a :class:`MergeCall` and returns out [T, H, R] and lse [T, H], both float32. The suite
        calls it if the capabilities declare the operation "merge".

    Raises
    ------
    InvalidArgument
        The capabilities declare the operation "merge", and `merge` is ``None``.
    """

    name: str
    version: str
    kernel: Kernel
    capabilities: Capabilities
    append: Callable[[AppendCall], None] | None = None
    merge: Callable[[MergeCall], Answers] | None = None

    def __post_init__(self) -> None:
        """Check that a declared merge exists."""
        if "merge" in self.capabilities.ops and self.merge is None:
            raise InvalidArgument(
                "merge", None, 'a callable, because the capabilities declare the operation "merge"'
            )

    @property
    def has_surroundings(self) -> bool:
        """Whether ``PAGED_MLA_SURROUNDINGS`` sets what surrounds the calls."""
        return True

    @property
    def mode(self) -> str:
        """The mode in which the kernel runs: "gpu" or "interpreter"."""
        return mode()

    @property
    def device(self) -> str:
        """The name of the device."""
        return torch.cuda.get_device_name() if self.mode == "gpu" else "Triton interpreter (CPU)"

    @property
    def memory_bytes(self) -> int:
        """The number of free bytes for a cache, after torch's cached memory is released.

        It is 1 GiB without a GPU.
        """
        if self.mode == "gpu":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
        return 1 << 30

    def prepare(self, problem: Problem) -> KernelRunner:
        """Return a runner for a problem.

        Raises
        ------
        Unsupported
            The capabilities do not cover the problem.
        """
        if unmet := self.capabilities.unmet(problem, (), ()):
            raise Unsupported("; ".join(unmet))
        return KernelRunner(problem, self, "cuda" if self.mode == "gpu" else "cpu")


__all__ = ["AppendCall", "Call", "Kernel", "KernelBackend", "MergeCall", "PageLists"]
