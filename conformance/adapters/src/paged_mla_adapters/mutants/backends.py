"""A backend for each careless kernel, by the kernel's name.

``--backend paged_mla_adapters.mutants.backends:writes-before-the-cache`` runs the suite on one.
"""

from __future__ import annotations

from collections.abc import Callable

from paged_mla_adapters.kernel import KernelBackend
from paged_mla_adapters.mutants.careless import MUTANTS


def __getattr__(name: str) -> Callable[[], KernelBackend]:
    """Return the factory of a mutant."""
    if name not in MUTANTS:
        raise AttributeError(f"no mutant is called {name!r}")
    return lambda: MUTANTS[name].backend
