"""What the adapters share: a backend made of a kernel.

What no kernel is given for is the reference's: planning always, and writing unless there is a
writer. So a kernel that only reads the cache can also be asked the groups that write before they
read; what such a run judges is its attention.
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
    """A backend of the suite, made of a kernel.

    Parameters
    ----------
    name, version : str
    kernel : callable
        Takes a :class:`Call`; returns out [T, H, R] and lse [T, H].
    capabilities : Capabilities
    append : callable or None
        Takes an :class:`AppendCall` and writes its tokens to the cache; ``None`` leaves that to the
        reference.
    merge : callable or None
        Takes a :class:`MergeCall`; returns out [T, H, R] and lse [T, H], both float32. It is asked
        where the capabilities declare the operation "merge".

    Raises
    ------
    InvalidArgument
        The capabilities declare that operation, and there is no merge.
    """

    name: str
    version: str
    kernel: Kernel
    capabilities: Capabilities
    append: Callable[[AppendCall], None] | None = None
    merge: Callable[[MergeCall], Answers] | None = None

    def __post_init__(self) -> None:
        """Refuse a declared operation that nothing does."""
        if "merge" in self.capabilities.ops and self.merge is None:
            raise InvalidArgument(
                "merge", None, 'a callable, since the operation "merge" is declared'
            )

    @property
    def has_surroundings(self) -> bool:
        """Whether ``PAGED_MLA_SURROUNDINGS`` sets what surrounds the calls."""
        return True

    @property
    def mode(self) -> str:
        """What the kernel runs on."""
        return mode()

    @property
    def device(self) -> str:
        """Name of the device."""
        return torch.cuda.get_device_name() if self.mode == "gpu" else "Triton interpreter (CPU)"

    @property
    def memory_bytes(self) -> int:
        """Bytes free for one cache, once what earlier calls left is given back."""
        if self.mode == "gpu":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
        return 1 << 30

    def prepare(self, problem: Problem) -> KernelRunner:
        """Build a runner; raises ``Unsupported``."""
        if unmet := self.capabilities.unmet(problem, (), ()):
            raise Unsupported("; ".join(unmet))
        return KernelRunner(problem, self, "cuda" if self.mode == "gpu" else "cpu")


__all__ = ["AppendCall", "Call", "Kernel", "KernelBackend", "MergeCall", "PageLists"]
