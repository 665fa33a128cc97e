"""A probe: one small call of a judged function, compared with the exact result."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paged_mla_adapters.guards import Overwritten
from paged_mla_adapters.judge.backend import JudgedBackend, backend_of
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.judge.csr import WrongLists
from paged_mla_conformance.runners.profile import load_profile
from paged_mla_conformance.runners.profile_adapter import adapted
from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.materialize import materialize
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases import Case
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.inputs import Step, build_steps
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output

FORGIVING = "vllm,stale"
"""The profile of a probe. Memory that no query sees has finite numbers, so outputs are finite."""
LOST_DEVICE = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "device-side assert",
    "unspecified launch failure",
)
"""Texts of CUDA errors after which a process can no longer use the device."""
LN2 = float(np.log(2.0))


@dataclass(frozen=True)
class Probe:
    """The outcome of a call.

    Parameters
    ----------
    why_not : str
        The error that the function raised; "" if it returned a result, right or wrong.
    error : float
        The relative distance between the output and the exact output, for the token where it is
        smallest. A wrong layout makes all tokens wrong, while a bug may leave a few tokens right.
        It is infinite if every token has a NaN, or if the probe does not measure it. For a writer
        it is the number of wrong bytes divided by the number of bytes that change.
    lse_errors : dict of str to float
        The relative distance of the lse for each base; empty if there is no lse or the probe does
        not measure it. For a merge it is the distance of the output, with an lse of each base.
    layouts : tuple of str
        The layouts of output and lse.
    """

    why_not: str = ""
    error: float = float("inf")
    lse_errors: dict[str, float] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()


class LostDevice(Exception):
    """After a call the process can no longer use the device."""


def probe(claims: Claims, case: Case, dims: MlaDims, dtype: str, *, measured: bool = True) -> Probe:
    """Call a function once on a case of one step.

    Parameters
    ----------
    claims : Claims
        The function. If the claims do not cover the case, the probe has a `why_not`.
    case : Case
        A case with one step.
    dims : MlaDims
    dtype : str
    measured : bool
        Whether to compare the output of an attention function with the exact output. The exact
        output takes most of the time.

    Returns
    -------
    Probe

    Raises
    ------
    LostDevice
        After the call the process can no longer use the device. The call counts as supported, so
        that a test of the suite fails.
    """
    if claims.softmax_scale is not None:
        case = replace(case, softmax_scale=claims.softmax_scale)
    attended = _measured if measured else _answered
    ask = {"append": _appended, "merge": _merged}.get(claims.kind, attended)
    (step,) = build_steps(case, dims, dtype)
    try:
        return ask(backend_of(claims), step)
    except (WrongLists, Overwritten):
        return Probe(layouts=("[T, H]", "[T, H]"), lse_errors={"natural": float("inf")})
    except (Exception, SystemExit) as error:  # any error means that the call is not supported
        said = " ".join(f"{type(error).__name__}: {error}".split())
        if any(words in said for words in LOST_DEVICE):
            raise LostDevice(said) from error
        return Probe(why_not=said[:300])


def _attended(backend: JudgedBackend, step: Step) -> tuple[Output, Batch, CacheImage]:
    batch, before = materialize(step)
    image = append(step.problem, batch, before)
    theirs = adapted(cast("Backend", backend), load_profile(FORGIVING))
    runner = theirs.prepare(step.problem)
    runner.load_cache(image)
    return runner.attend(batch), batch, image


def _answered(backend: JudgedBackend, step: Step) -> Probe:
    _attended(backend, step)
    return Probe(layouts=tuple(backend.judged.layouts))


def _measured(backend: JudgedBackend, step: Step) -> Probe:
    answer, batch, image = _attended(backend, step)
    exact = attend(step.problem, batch, image, Rounding.EXACT)
    layouts = tuple(backend.judged.layouts)
    return Probe(
        "",
        _distance(answer.out, exact.out),
        _bases(answer.lse, exact.lse) if layouts[1] else {},
        layouts,
    )


def _appended(backend: JudgedBackend, step: Step) -> Probe:
    batch, before = materialize(step)
    runner = backend.prepare(step.problem)
    runner.load_cache(before)
    runner.append(batch)
    blocks = np.arange(step.problem.num_blocks, dtype=np.int64)
    right = append(step.problem, batch, before).read(blocks)
    wrong = runner.read_cache(blocks) != right
    written = right != before.read(blocks)
    return Probe("", float(wrong.sum() / max(written.sum(), 1)))


def _merged(backend: JudgedBackend, step: Step) -> Probe:
    shape = step.batch.q_nope.shape
    rng = np.random.default_rng(1)
    partials = [
        Output(
            rng.standard_normal(shape).astype(np.float32),
            rng.standard_normal(shape[:2]).astype(np.float32),
        )
        for _ in range(2)
    ]
    exact = merge(partials)
    found = {}
    for base, factor in (("natural", 1.0), ("base 2", 1 / LN2)):
        theirs = [Output(part.out, (part.lse * factor).astype(np.float32)) for part in partials]
        answer = backend.prepare(step.problem).merge(theirs)
        found[base] = _distance(answer.out, exact.out)
    return Probe("", min(found.values()), found, ("[T, H]", backend.judged.claims.lse_layout))


def _distance(found: NDArray[Any], right: NDArray[Any]) -> float:
    """Return the smallest relative distance over the first axis; inf if no distance is finite."""
    lines, exact = (array.reshape(len(array), -1).astype(np.float64) for array in (found, right))
    difference = np.linalg.norm(lines - exact, axis=1)
    distances = difference / np.maximum(np.linalg.norm(exact, axis=1), 1e-30)
    return float(min(distances[np.isfinite(distances)], default=np.inf))


def _bases(lse: NDArray[np.float32], right: NDArray[np.float64]) -> dict[str, float]:
    seen = np.isfinite(right).all(axis=1)
    return {
        base: _distance(lse[seen] * factor, right[seen])
        for base, factor in (("natural", 1.0), ("base 2", LN2))
    }
