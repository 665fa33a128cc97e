"""Rule S-11: 8-bit queries, for kernels that multiply them with the codes of an 8-bit cache.

The query of a token and head is one line ``[q_nope || q_pe]``; its second part is first rotated and
rounded to the problem's dtype (S-12). Its numbers become e4m3 codes in the same way as cached
numbers (:mod:`paged_mla_reference.rules.fp8`): ``e4m3(x / s)``, one float32 division and one
rounding. The scale s is either one float32 for all queries, which the caller passes, or it is
computed for each line from the data of both parts: ``max(amax / 448, 2^-126)``.

A number that is too large for a passed scale becomes 448 with its sign. Infinities and NaN become
NaN. They are ignored when a scale is computed, and the output of their query must show them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.fp8 import quantize, scale_of, to_float32
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_shared.problem import Batch, Problem


def quantize_queries(
    problem: Problem, batch: Batch, scale: float | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the step's queries as codes with scales (S-11); rows of padding may hold any bits.

    Parameters
    ----------
    problem : Problem
    batch : Batch
    scale : float or None
        A finite float32 > 0 that divides all queries. ``None`` computes a scale from the data for
        each token and head.

    Returns
    -------
    codes : uint8 [T, H, R + P]
    scales : float32 [T, H]
        The factor by which each line's codes are multiplied to get its values.
    """
    q_pe = batch.q_pe
    if problem.rope is not None:
        turned = rotate(widen(q_pe), metadata(problem, batch).positions, problem.rope)
        q_pe = round_to(turned, problem.dtype)
    x = to_float32(np.concatenate([batch.q_nope, q_pe], axis=-1))  # [T, H, R + P]
    scales = scale_of(x) if scale is None else np.full(x.shape[:2], scale, np.float32)
    finite = np.where(np.isinf(x), np.float32(np.nan), x)
    return quantize(finite, scales[..., None]), scales
