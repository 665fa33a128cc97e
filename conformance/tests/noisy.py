"""A backend whose outputs no fault explains, because they contain random noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paged_mla_conformance import template
from paged_mla_shared.problem import Batch, Output, Problem


class Runner(template.Runner):
    """A runner of the template that adds noise."""

    def attend(self, batch: Batch) -> Output:
        """Return outputs with errors of a few percent, and a right lse."""
        right = super().attend(batch)
        noise = np.random.default_rng(5).standard_normal(right.out.shape)
        return replace(right, out=(right.out * (1 + 0.05 * noise)).astype(right.out.dtype))


class Backend(template.Backend):
    """A backend of the template with the head counts of the tests."""

    capabilities = replace(template.Backend.capabilities, num_heads=frozenset({8, 9, 16, 24}))

    def prepare(self, problem: Problem) -> Any:
        """Return a runner."""
        return Runner(problem)


create = Backend
