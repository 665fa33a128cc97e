"""Faults of attention that show only with 8-bit caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import Seen, only_before, seeing
from paged_mla_reference.faults.kernel.formats import READ
from paged_mla_reference.faults.patches import patched
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules import fp8
from paged_mla_reference.rules.e4m3 import decode
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Output, Problem


@kernel_fault(FaultClass.LEAK, *READ)
def nan_codes_are_read_as_480(oracle: Oracle) -> Oracle:
    """The two e4m3 codes for NaN are read as 480 and -480."""

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        mine = get_ident()

        def numbers(codes: NDArray[np.uint8]) -> NDArray[Any]:
            values = decode(codes)
            if get_ident() != mine:  # other threads attend at the same time, without the fault
                return values
            next_ones = np.where(codes >> 7, np.float32(-480), np.float32(480))
            return np.where(np.isnan(values), next_ones, values)

        with patched((fp8, "decode", numbers)):
            return oracle.attend(problem, batch, image)

    return replace(oracle, attend=attend)


def _over_codes(
    oracle: Oracle, change: Callable[[Problem, Batch], tuple[Problem, Batch]]
) -> Oracle:
    """Return an oracle whose attention over 8-bit caches uses a changed step."""

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        if not problem.layout.format.is_plain:
            problem, batch = change(problem, batch)
        return oracle.attend(problem, batch, image)

    return replace(oracle, attend=attend)


@kernel_fault(FaultClass.CAUSAL, "S-4", *READ, through=_over_codes)
def codes_are_always_causal(problem: Problem, batch: Batch) -> tuple[Problem, Batch]:
    """With an 8-bit cache, the kernel applies a causal mask to a non-causal step."""
    causal = problem.mask is Mask.NON_CAUSAL
    return (replace(problem, mask=Mask.CAUSAL) if causal else problem), batch


@kernel_fault(FaultClass.MASK, "S-4", "S-14", *READ, through=_over_codes)
def full_masks_over_codes_are_chains(problem: Problem, batch: Batch) -> tuple[Problem, Batch]:
    """With an 8-bit cache, the kernel ignores a FULL mask and uses a causal mask."""
    if problem.mask is not Mask.TREE or problem.mask_spelling is not MaskSpelling.FULL:
        return problem, batch
    return replace(problem, mask=Mask.CAUSAL, max_draft_tokens=0), replace(batch, mask=None)


@kernel_fault(FaultClass.TRUNCATED, "S-4", *READ, through=seeing)
def codes_past_2048_keys_are_dropped(problem: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """With an 8-bit cache, the kernel reads only the first 2048 keys of a row."""
    return seen if problem.layout.format.is_plain else only_before(seen, 2048)
