"""A backend whose outputs no fault explains: each has noise of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paged_mla_conformance import template
from paged_mla_shared.problem import Batch, Output, Problem


class Runner(template.Runner):
    """The template's, but for noise."""

    def attend(self, batch: Batch) -> Output:
        """Return answers that are a few percent off, and an lse that is right."""
        right = super().attend(batch)
        noise = np.random.default_rng(5).standard_normal(right.out.shape)
        return replace(right, out=(right.out * (1 + 0.05 * noise)).astype(right.out.dtype))


class Backend(template.Backend):
    """The template's, for the cases that the tests ask."""

    capabilities = replace(template.Backend.capabilities, num_heads=frozenset({8, 9, 16, 24}))

    def prepare(self, problem: Problem) -> Any:
        """Return a runner."""
        return Runner(problem)


create = Backend
