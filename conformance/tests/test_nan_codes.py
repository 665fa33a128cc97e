"""Codes of 8 bits that represent NaN: the suite finds a backend that hides them (S-11)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.meta.mutants.backends import EVERY_FORMAT, MutantBackend
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.suite.bad_inputs.nan_codes import NAN_CODES, check_nan_code, trials
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.backend import Runner
from paged_mla_shared.problem import Batch, Output, Problem

CAPABILITIES = replace(EVERY_FORMAT, cache_formats=frozenset({"fp32", "fp8_e4m3"}))


def hiding(what: str, value: float) -> Trial:
    """Return a trial of a backend that replaces NaN in the output `what` by `value`."""

    class Hides(ForwardingRunner):
        def attend(self, batch: Batch) -> Output:
            output = self.inner.attend(batch)
            answer = getattr(output, what)
            return replace(output, **{what: np.where(np.isnan(answer), value, answer)})

    def wrap(problem: Problem, runner: Runner) -> Runner:
        return Hides(problem, runner)

    backend = MutantBackend(capabilities=CAPABILITIES, wrap=wrap)
    run = Run(backend, "made:up", "small", load_profile(STRICT), ("float32",))
    [trial] = trials(run)
    return trial


@pytest.mark.parametrize("code", NAN_CODES)
@pytest.mark.parametrize(("what", "elements"), [("out", 64), ("lse", 2)])
@pytest.mark.parametrize("value", [0.5, np.inf, -np.inf])
def test_an_output_that_is_not_nan_is_named(code: int, what: str, elements: int, value: float):
    """The error names the wrong output and its first value."""
    said = rf"\[S-11\] {what}: {elements} of {elements} .* {code:#04x} are not NaN .* is {value}$"
    with pytest.raises(Mismatch, match=said):
        check_nan_code(hiding(what, value), code)
