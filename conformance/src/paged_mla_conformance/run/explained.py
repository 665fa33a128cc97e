"""Explain the smallest failing step of each cause: find a known fault with the same output."""

from __future__ import annotations

import tempfile
from pathlib import Path

from paged_mla_conformance.run.asked_again import ask_again
from paged_mla_conformance.run.options import Options
from paged_mla_conformance.run.reports.report import Report
from paged_mla_reference.explain.checks.limits import check_keys, check_pairs
from paged_mla_reference.explain.explanation import Explanation, explain
from paged_mla_reference.explain.hypotheses.residual import Residual
from paged_mla_reference.explain.joint_explanation import explain_jointly
from paged_mla_shared.dump import load_dump
from paged_mla_shared.errors import InvalidArgument

_MOST = 3  # causes that are explained
_NEAR = 0.5  # share of the wrong elements that a fault must explain to be named
_PASSES_ALONE = (
    "This test passes when it is the only test of a new process. The output depends on earlier "
    "calls, for example through a buffer or a plan that is kept between calls (S-17)."
)


def explain_causes(options: Options, report: Report) -> None:
    """Look for known faults that explain each of the first causes, and all of them together.

    Parameters
    ----------
    options : Options
        The options of the finished run.
    report : Report
        The report of the finished run. For each of the first three causes with a readable dump,
        ``explanations`` gets the fault that explains at least half of the wrong elements, or "". If
        a test passes alone, ``explanations`` gets a sentence about that, and ``nan_origins`` loses
        the tests of its cause. If at least two dumps were read, ``shared_fault`` gets the fault
        that explains all of them, or "".
    """
    explanations: list[Explanation] = []
    with tempfile.TemporaryDirectory() as folder:
        causes = [cause for cause in report.causes if cause.has_dump]
        for number, cause in enumerate(causes[:_MOST]):
            test, path = cause.smallest.test, Path(folder, f"{number}.safetensors")
            alone = ask_again(options, report, test, f"--mla-dump={path}")
            if alone is not None and alone.outcome == "passed":
                report.explanations[test] = _PASSES_ALONE
                for other in cause.tests:  # a test that passes alone shows no origin of a NaN
                    report.nan_origins.pop(other, None)
            elif (found := _explained(path)) is not None:
                explanations.append(found)
                report.explanations[test] = _sentence(found)
    if len(explanations) > 1:
        together = explain_jointly(explanations)
        report.shared_fault = together.cause if together.best else ""


def _explained(path: Path) -> Explanation | None:
    """Return the explanation of a dump; ``None`` if it is missing, unreadable or too large."""
    if not path.exists():
        return None
    try:
        dump = load_dump(path)
        check_keys(dump)
        check_pairs(dump)
    except InvalidArgument:
        return None
    return explain(dump)


def _sentence(found: Explanation) -> str:
    """Return the fault that gives the output in a dump, or nearly gives it; "" if there is none."""
    is_near = any(_share(fit.residual) >= _NEAR for fit in found.fits[:1])
    return found.cause if found.best or is_near else ""


def _share(residual: Residual) -> float:
    """Return the share of the wrong elements that a fault explains."""
    return 1 - residual.wrong / max(residual.was, 1)
