"""A problem that nothing of another one may be taken from (S-17)."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_shared.backend import Capabilities
from paged_mla_shared.problem import Problem, Rope, RopePairing


def unlike(problem: Problem, capabilities: Capabilities) -> Problem:
    """Return a problem of another scale and, where declared, a rotation; the same steps fit."""
    ropes = sorted(capabilities.ropes)
    rope = Rope(RopePairing(ropes[0])) if ropes else None
    return replace(problem, softmax_scale=2 * problem.softmax_scale, rope=rope)
