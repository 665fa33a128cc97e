"""What other projects hold an attention kernel's answer to, as one function each.

Each takes an answer and the right one, and returns whether the check lets it pass.
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
    """Return whether FlashInfer-Bench lets an answer pass, with the values that it has by default.

    An element is wrong if its absolute and its relative error are both past 1e-2. No element may
    be wrong, none infinite and none NaN. The lse has base 2. Source: ``compute_error_stats`` in
    ``flashinfer_bench/bench/utils.py``, ``check_correctness`` in
    ``flashinfer_bench/bench/evaluators/default.py`` and ``ResolvedEvalConfig`` in
    ``flashinfer_bench/bench/config.py``, flashinfer-ai/flashinfer-bench at 40e6ca78.
    """
    pairs = ((actual.out, right.out), (actual.lse / _LN2, right.lse / _LN2))
    return _same_form(actual, right) and all(_bench_close(*pair) for pair in pairs)


def judges_bench(right: Output) -> bool:
    """Return whether FlashInfer-Bench lets the right answer pass, which has no infinite lse."""
    return bool(np.isfinite(right.lse).all())


def passes_kit(actual: Output, right: Output) -> bool:
    """Return whether the tolerance of SGLang's attention kit lets out and lse pass.

    No error may be past 3e-2 + 3e-2 * the right value, as ``torch.testing.assert_close`` has it.
    Source: ``MLA_ATOL`` and ``MLA_RTOL`` in
    ``python/sglang/test/kits/attention_unittest/attention_methods/mla_attention.py``,
    sgl-project/sglang at 0049d63a. The kit itself compares the output of a layer, and no lse.
    """
    return passes_kit_out(actual, right) and _kit_close(actual.lse, right.lse)


def passes_kit_out(actual: Output, right: Output) -> bool:
    """Return what :func:`passes_kit` does of an answer whose lse nobody looks at."""
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
