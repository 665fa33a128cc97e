"""A backend that lacks a core capability and says so; what needs it, it refuses to prepare."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.rules.validation.inputs import validate_problem
from paged_mla_shared.backend import Runner
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.problem import Problem


class Refusing(ReferenceBackend):
    """It prepares no problem that is beyond what it declares."""

    def prepare(self, problem: Problem) -> Runner:
        """Refuse what is not declared."""
        validate_problem(problem)  # what is wrong with a problem is said first
        unmet = self.capabilities.unmet(problem, (), ())
        if unmet:
            raise Unsupported("; ".join(unmet))
        return super().prepare(problem)


def create() -> Refusing:
    return Refusing(capabilities=replace(CAPABILITIES, masks=frozenset({"causal"})))


def narrow() -> Refusing:
    """Return a backend of one block size and one head count, that rotates nothing either."""
    sizes = {"block_sizes": frozenset({16}), "num_heads": frozenset({4})}
    causal = create().capabilities
    return Refusing(capabilities=replace(causal, ropes=frozenset(), max_query_len=64, **sizes))
