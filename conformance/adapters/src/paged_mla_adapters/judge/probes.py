"""One small call of a judged function, held against the exact answer."""

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
"""The profile of a probe: memory that no query sees holds finite numbers, so answers are finite."""
LOST_DEVICE = (
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "device-side assert",
    "unspecified launch failure",
)
"""What CUDA says of a call after which its process gets no answer any more."""
LN2 = float(np.log(2.0))


@dataclass(frozen=True)
class Probe:
    """What became of a call.

    Parameters
    ----------
    why_not : str
        The error that the function raised; "" for an answer, right or wrong.
    error : float
        The distance of outputs from the exact ones, as a share of these, for the token that is the
        nearest: a wrong layout is wrong everywhere, and a bug may be wrong almost everywhere.
        Infinite if each token has a NaN. Of a writer: wrong bytes as a share of those it writes.
    lse_errors : dict of str to float
        The distance of the lse, likewise, were it in each base; empty where there is none.
    layouts : tuple of str
        Of out and lse.
    """

    why_not: str = ""
    error: float = float("inf")
    lse_errors: dict[str, float] = field(default_factory=dict)
    layouts: tuple[str, ...] = ()


class LostDevice(Exception):
    """No further call of this process gets an answer from the device."""


def probe(claims: Claims, case: Case, dims: MlaDims, dtype: str, *, measured: bool = True) -> Probe:
    """Call a function once, whatever it is said to serve.

    Parameters
    ----------
    claims : Claims
    case : Case
        Of one step.
    dims : MlaDims
    dtype : str
    measured : bool
        Whether the answer of an attention function is compared with the exact one, whose
        computation takes most of the time.

    Returns
    -------
    Probe

    Raises
    ------
    LostDevice
        The call ended the process's use of the device. It is served, and the suite finds that.
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
    except (Exception, SystemExit) as error:  # whatever it raises, it does not serve this
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
    """Return the distance of two arrays as a share of the second, in the line that is nearest."""
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
