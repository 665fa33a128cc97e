"""The checks of other projects for the output of an attention kernel, one function each.

Each function takes an output and the right output, and returns whether the check accepts it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.problem import Output

_BENCH = 1e-2
_BENCH_EPS = 1e-8
_KIT = 3e-2
_LN2 = float(np.log(2.0))


def passes_bench(actual: Output, right: Output) -> bool:
    """Return whether FlashInfer-Bench accepts an output with its default tolerances.

    An element is wrong if its absolute and its relative error are both above 1e-2. No element may
    be wrong, infinite or NaN. The lse is converted to base 2. Source: ``compute_error_stats`` in
    ``flashinfer_bench/bench/utils.py``, ``check_correctness`` in
    ``flashinfer_bench/bench/evaluators/default.py`` and ``ResolvedEvalConfig`` in
    ``flashinfer_bench/bench/config.py``, flashinfer-ai/flashinfer-bench at 40e6ca78.
    """
    pairs = ((actual.out, right.out), (actual.lse / _LN2, right.lse / _LN2))
    return _same_form(actual, right) and all(_bench_close(*pair) for pair in pairs)


def judges_bench(right: Output) -> bool:
    """Return whether FlashInfer-Bench accepts the right output: it must have no infinite lse."""
    return bool(np.isfinite(right.lse).all())


def passes_kit(actual: Output, right: Output) -> bool:
    """Return whether the tolerance of SGLang's attention kit accepts `out` and `lse`.

    No error may exceed 3e-2 + 3e-2 * |right value|, as in ``torch.testing.assert_close``.
    Source: ``MLA_ATOL`` and ``MLA_RTOL`` in
    ``python/sglang/test/kits/attention_unittest/attention_methods/mla_attention.py``,
    sgl-project/sglang at 0049d63a. The kit itself compares the output of a layer, and no lse.
    """
    return passes_kit_out(actual, right) and _kit_close(actual.lse, right.lse)


def passes_kit_out(actual: Output, right: Output) -> bool:
    """Return the same as :func:`passes_kit` without a check of the lse."""
    return _same_form(actual, right) and _kit_close(actual.out, right.out)


def _same_form(actual: Output, right: Output) -> bool:
    pairs = ((actual.out, right.out), (actual.lse, right.lse))
    return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def _bench_close(actual: NDArray[Any], right: NDArray[Any]) -> bool:
    a, b = actual.astype(np.float32), right.astype(np.float32)
    if not np.isfinite(a).all():
        return False
    error = np.abs(a - b)
    return not ((error > _BENCH) & (error / (np.abs(b) + _BENCH_EPS) > _BENCH)).any()


def _kit_close(actual: NDArray[Any], right: NDArray[Any]) -> bool:
    a, b = actual.astype(np.float64), right.astype(np.float64)
    return bool(np.isclose(a, b, rtol=_KIT, atol=_KIT).all())
