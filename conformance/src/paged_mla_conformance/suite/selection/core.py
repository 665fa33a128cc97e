"""The capabilities that a backend must declare to be conformant, for each mode.

An interpreter computes wrong results in bfloat16 and cannot hold a cache of more than 2^31
elements, so fewer capabilities are required there. The verdict names the mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_mla_conformance.runners.profile import Profile
from paged_mla_conformance.suite.selection.adapt_case import adapt_dims
from paged_mla_shared.backend import OPERATIONS, Backend
from paged_mla_shared.cases import CASES
from paged_mla_shared.dims import PRESETS, MlaDims
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE


@dataclass(frozen=True)
class Core:
    """Core requirements of one mode.

    Parameters
    ----------
    dims : str
        The preset of model dims for this mode, unless the user passes ``--dims``.
    dtypes : tuple of str
        Element types that must be declared.
    optional : frozenset of str
        Operations and features that are not required. Without them, tests are only "not supported".
    """

    dims: str
    dtypes: tuple[str, ...]
    optional: frozenset[str]


_OWED = frozenset({"plan", "append", "attend", "merge"})
_OPTIONAL = frozenset(OPERATIONS) - _OWED | {"batch_invariant", "bounded"}

CORE = {
    "gpu": Core(
        "deepseek-v3",
        ("bfloat16", "float16"),
        _OPTIONAL,
    ),
    "interpreter": Core(
        "small",
        ("float32",),
        _OPTIONAL | {"large_offsets"},
    ),
    "cpu": Core(
        "small",
        ("float32", "float16", "bfloat16"),
        _OPTIONAL - {"gather_context"},
    ),
}

SUITE_GROUPS = (*CASES, "merge", "errors", "trace")

ALL_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Run:
    """One run of the suite: a backend, the name of its factory, dims, a profile and dtypes."""

    backend: Backend
    factory: str
    dims_name: str
    profile: Profile
    chosen_dtypes: tuple[str, ...] = ()

    @property
    def core(self) -> Core:
        """Core requirements of the backend's mode."""
        return CORE[self.backend.mode]

    @property
    def dims(self) -> MlaDims:
        """Model dims of every case, with the nearest head count that the backend declares."""
        return adapt_dims(PRESETS[self.dims_name], self.backend.capabilities)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the user chose, else the core dtypes of the mode."""
        return self.chosen_dtypes or self.core.dtypes

    @property
    def formats(self) -> tuple[str, ...]:
        """The cache formats that the backend declares, without the plain ones, sorted."""
        declared = self.backend.capabilities.cache_formats
        return tuple(sorted(declared - set(PLAIN_FORMAT_OF_DTYPE.values())))
