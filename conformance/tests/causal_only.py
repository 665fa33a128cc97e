"""A backend that lacks a core capability and says so; what needs it, it refuses to prepare."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.validate import validate_problem
from paged_mla_shared.backend import Runner
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.problem import Problem


class CausalOnly(ReferenceBackend):
    """It knows causal masks alone."""

    def prepare(self, problem: Problem) -> Runner:
        """Refuse what is not declared."""
        validate_problem(problem)  # what is wrong with a problem is said first
        unmet = self.capabilities.unmet(problem, (), ())
        if unmet:
            raise Unsupported("; ".join(unmet))
        return super().prepare(problem)


def create() -> CausalOnly:
    return CausalOnly(capabilities=replace(CAPABILITIES, masks=frozenset({"causal"})))
