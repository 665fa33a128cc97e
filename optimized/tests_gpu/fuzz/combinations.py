"""Every combination of kernel family, cache format and mode that dispatch can produce."""

from __future__ import annotations

from dataclasses import dataclass

from paged_mla_optimized.config.architectures import INTERPRETER
from paged_mla_optimized.planning.families import PORTABLE, Demand, serving_variant
from paged_mla_optimized.planning.prefill import HOPPER_DIMS, is_for_hopper
from paged_mla_shared.dims import DEEPSEEK_V3, MISTRAL_SMALL_4, SMALL, MlaDims
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, PLAIN_FORMAT_OF_DTYPE

PREFILL = "prefill"  # kernels/hopper/prefill.py
PORTABLE_PREFILL = "portable_prefill"  # kernels/portable/prefill.py

EAGER = "eager"
BATCH_INVARIANT = "batch_invariant"
GRAPHED = "graphed"
FAST = "fast"

DIMS = {
    (512, 64): DEEPSEEK_V3,
    (256, 64): MISTRAL_SMALL_4,
    (256, 32): MlaDims(4, 256, 32, 64, 128),
    (32, 16): SMALL,
}
"""Model dims by (R, P): each pair that the backend declares."""


@dataclass(frozen=True, order=True)
class Combination:
    """A kernel family, the format of the cache that it reads, and how steps run.

    Parameters
    ----------
    family : str
        Key of ``FAMILIES``, :data:`PREFILL` or :data:`PORTABLE_PREFILL`. The last two read no
        cache; their cache format is the plain format of their dtype.
    cache_format : str
    mode : str
        "eager", "batch_invariant" or "graphed"; behind "fast" where products are fast, and "fast"
        alone for eager steps of fast products.
    """

    family: str
    cache_format: str
    mode: str

    def __str__(self) -> str:
        return f"{self.family}/{self.cache_format}/{self.mode}"

    @property
    def products(self) -> str:
        """What ``MlaConfig.products`` is."""
        return "fast" if self.mode.startswith(FAST) else "exact"

    @property
    def running(self) -> str:
        """How steps run, for both kinds of products."""
        return self.mode.removeprefix(FAST).removeprefix("-") or EAGER

    @property
    def is_prefill(self) -> bool:
        """Whether heads are materialized."""
        return self.family in {PREFILL, PORTABLE_PREFILL}


def mode_of(products: str, running: str) -> str:
    """Return the mode's name."""
    if products == "exact":
        return running
    return FAST if running == EAGER else f"{FAST}-{running}"


def dtypes_of(cache_format: str, arch: str) -> tuple[str, ...]:
    """Return the element types that a cache of this format may go with."""
    known = [d for d in PLAIN_FORMAT_OF_DTYPE if arch != INTERPRETER or d != "bfloat16"]
    if FORMATS[cache_format].is_plain:
        known = [dtype for dtype in known if PLAIN_FORMAT_OF_DTYPE[dtype] == cache_format]
    return tuple(known)


def families_of(arch: str, cache_format: str, products: str) -> set[str]:
    """Return the families that serve some step over such caches."""
    found = {
        serving_variant(
            Demand(
                arch=arch,
                dtype=dtype,
                cache_format=cache_format,
                products=products,
                num_heads=heads,
                head_dims=head_dims,
            ),
            query_len,
        ).family
        for dtype in dtypes_of(cache_format, arch)
        for head_dims in DIMS
        for heads in range(1, 129)
        for query_len in (1, 300)
    }
    # The portable kernel also takes every cache that a Gluon kernel cannot address.
    return found | ({PORTABLE} if dtypes_of(cache_format, arch) else set())


def combinations(arch: str) -> list[Combination]:
    """Return every combination on an architecture.

    Products change which family serves, but do not change a family that is exact. An exact family
    that also serves fast products runs with fast products only in eager steps.
    """
    runnings = [EAGER, BATCH_INVARIANT] + ([GRAPHED] if arch != INTERPRETER else [])
    found: list[Combination] = []
    for name, stored in FORMATS.items():
        exact = families_of(arch, name, "exact")
        fast = set() if stored.is_plain else families_of(arch, name, "fast")
        found += [Combination(family, name, how) for family in exact for how in runnings]
        found += [Combination(family, name, FAST) for family in fast]
        found += [
            Combination(family, name, mode_of("fast", how))
            for family in fast - exact
            for how in runnings[1:]
        ]
        found += [
            Combination(family, name, EAGER)
            for dtype in dtypes_of(name, arch)
            if stored.is_plain
            for family in (PREFILL, PORTABLE_PREFILL)
            if family == PORTABLE_PREFILL or is_for_hopper(arch, dtype, HOPPER_DIMS)
        ]
    return sorted(found)


def combination_of(arch: str, name: str) -> Combination:
    """Return the combination that is written as `name`.

    Raises
    ------
    InvalidArgument
        No such combination on this architecture.
    """
    for combination in combinations(arch):
        if str(combination) == name:
            return combination
    raise InvalidArgument("combination", name, ", ".join(map(str, combinations(arch))))
