"""Format an explanation as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from paged_mla_reference.explain.checks.finding import Finding, State
from paged_mla_reference.explain.explanation import Explanation
from paged_mla_reference.explain.joint_explanation import JointExplanation
from paged_mla_reference.explain.render.maps import Maps
from paged_mla_shared.documents import one_line

_WIDTH = 100
_MARKS = {State.HELD: "holds    ", State.BROKEN: "broken   ", State.UNDECIDED: "undecided"}
_COLOURS = {State.HELD: "32", State.BROKEN: "1;31", State.UNDECIDED: "33"}
_SHADES = " .:-=+*#%@"


def summary(explanation: Explanation, maps: Maps | None, *, colour: bool) -> str:
    """Return an explanation as text.

    `maps` adds the errors of rows and heads. `colour` adds terminal colors to the outcomes of
    checks.
    """
    found = explanation.found
    problem = found.step.dump.problem
    batch = found.step.batch
    size = "" if batch is None else f"{batch.num_rows} rows, {batch.num_tokens} tokens, "
    types = f"{problem.dtype}, cache {problem.cache_format}, block size {problem.block_size}"
    origin = one_line(found.step.dump.origin) or "a step"
    lines = [
        f"{origin}: {size}{problem.dims.num_heads} heads, {types}",
        "",
        *(_line(finding, colour=colour) for finding in found.findings),
        "",
        *textwrap.wrap(explanation.verdict, _WIDTH),
    ]
    if found.first is not None:
        lines += textwrap.wrap(f"{found.first.rule}: {found.first.sentence}", _WIDTH)
        lines += ["", *textwrap.wrap(explanation.cause, _WIDTH)]
    if explanation.fits:
        lines += ["", "hypotheses                                          still wrong   off by"]
        lines += [
            f"  {fit.hypothesis.name[:48]:48} {fit.residual.wrong + fit.elsewhere:8} of "
            f"{fit.residual.was:<8} {fit.residual.largest:.2g}"
            for fit in explanation.fits[:5]
        ]
    if maps is not None and maps.rows:
        lines += ["", *_heat(maps)]
    return "\n".join(lines)


def summary_of_several(found: JointExplanation, paths: Sequence[str]) -> str:
    """Return the text for dumps that are explained together."""
    lines = []
    for number, (path, explanation) in enumerate(zip(paths, found.explanations, strict=True), 1):
        said = one_line(f"{number}. {path}: {explanation.verdict}")
        lines += [*textwrap.wrap(said, _WIDTH, subsequent_indent="   "), ""]
        if explanation.cause and not found.best:
            alone = textwrap.wrap(f"This dump alone: {explanation.cause}", _WIDTH - 3)
            lines[-1:] = [textwrap.indent("\n".join(alone), "   "), ""]
    lines += textwrap.wrap(found.cause or _none_broken(found), _WIDTH)
    if found.fits:
        columns = "".join(f"{number:>8}" for number in range(1, len(paths) + 1))
        lines += ["", f"{'share still wrong in each dump':50}{columns}"]
        lines += [
            f"  {fit.hypothesis.name[:48]:48}" + "".join(f"{share:>8.0%}" for share in fit.left)
            for fit in found.fits[:5]
        ]
    return "\n".join(lines)


def _none_broken(found: JointExplanation) -> str:
    """Return the last line for dumps that break no rule, or are undecided in part."""
    findings = [f for explanation in found.explanations for f in explanation.found.findings]
    if any(finding.state is State.UNDECIDED for finding in findings):
        return "No rule is broken in what the dumps contain; some checks are undecided."
    return "No rule is broken in any of the dumps."


def _line(finding: Finding, *, colour: bool) -> str:
    mark = _MARKS[finding.state]
    if colour:
        mark = f"\x1b[{_COLOURS[finding.state]}m{mark}\x1b[0m"
    said = finding.detail
    if finding.state is State.HELD and finding.budget:
        said = (
            f"worst error {finding.error:.2g}, {finding.error / finding.budget:.0%} of its budget"
        )
    text = one_line(f"{finding.stage:9} {finding.what}: {said}")
    return f"{mark} {textwrap.shorten(text, _WIDTH - 10, placeholder=' ...')}"


def _heat(maps: Maps) -> list[str]:
    """Return the errors of rows and heads as characters; a blank is within its budget."""
    lines = [
        "errors relative to their budgets: a line per row, a column per head (blank: within budget)"
    ]
    for label, shares in list(zip(maps.rows, maps.by_head, strict=True))[:24]:
        cells = "".join(_shade(share) for share in shares)
        lines.append(f"{label:>9} |{cells[:_WIDTH]}|")
    if len(maps.rows) > 24:
        lines.append(f"          and {len(maps.rows) - 24} more lines")
    return lines


def _shade(share: float) -> str:
    """Return a character for an error: a denser one for each power of two of the budget."""
    if not share > 1:
        return " "
    return _SHADES[min(int(share).bit_length(), len(_SHADES) - 1)] if share < 1e9 else "@"
