"""A backend that does not declare a core capability and refuses problems that need it."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.rules.validation.inputs import validate_problem
from paged_mla_shared.backend import Runner
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.problem import Problem


class Refusing(ReferenceBackend):
    """Refuses every problem that needs an undeclared capability."""

    def prepare(self, problem: Problem) -> Runner:
        """Return a runner, or raise ``Unsupported``."""
        validate_problem(problem)  # an illegal problem raises another error
        unmet = self.capabilities.unmet(problem, (), ())
        if unmet:
            raise Unsupported("; ".join(unmet))
        return super().prepare(problem)


def create() -> Refusing:
    return Refusing(capabilities=replace(CAPABILITIES, masks=frozenset({"causal"})))


def narrow() -> Refusing:
    """Return a backend with one block size, one head count and no rotation."""
    sizes = {"block_sizes": frozenset({16}), "num_heads": frozenset({4})}
    causal = create().capabilities
    return Refusing(capabilities=replace(causal, ropes=frozenset(), max_query_len=64, **sizes))
