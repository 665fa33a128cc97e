"""The summary at the end of a run: the causes of failures, the tests that did not run, the verdict.

The summary of several tests has at most 40 lines. A run of one test prints its whole failure. The
reports contain every failure with its traceback.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from paged_mla_conformance.run.reports.causes import DUMP, Cause
from paged_mla_conformance.run.reports.report import CORE_MISSING, Report
from paged_mla_conformance.run.reports.result import (
    FAILED_AS_EXPECTED,
    SKIPPED,
    Result,
    shown_outcome,
)
from paged_mla_reference.rules import RULES
from paged_mla_shared.documents import one_line, printable

MOST_LINES = 40
WIDTH = 160

_UNDECLARED = re.compile(r"(\w+) ([^ ;]+) not declared.*?(\([^()]*\))$")
_MOST_SKIPPED = 5  # lines about tests that did not run
_MOST_KNOWN = 3  # lines about expected failures
_MOST_AGAINST = 5  # reasons against the backend
_MOST_OF_A_REASON = 2  # lines of one reason
_LONGEST = WIDTH - len("problem: ")  # of a line that may get a prefix


def write(report: Report, stream: TextIO, *, dump: Path | None = None) -> None:
    """Print the summary; its last line is the verdict.

    Parameters
    ----------
    report : Report
    stream : TextIO
    dump : Path or None
        The path of the dump that the user requested.
    """
    end = [*_left_out(report), *_around(report), report.verdict]
    if len(report.results) == 1:
        [result] = report.results
        lines = _whole(result, report) if result.fails else []
    else:
        shared = report.shared_fault
        lines = _wrapped(f"One fault explains the first causes: {shared}", 2) if shared else []
        room = MOST_LINES - len(lines) - "\n".join(end).count("\n") - 1 - (dump is not None)
        lines += _of_causes(report.causes, room)
    if dump is not None:
        lines.append(_about_dump(dump))
    stream.write(printable("\n".join([*lines, *end])) + "\n")
    stream.flush()


def _whole(result: Result, report: Report) -> list[str]:
    """Return the lines about the only test of a run: its failure with its traceback."""
    notes = [f"note: {result.note}"] if result.note else []
    word = shown_outcome(result.outcome, result.reason)
    lines = [f"{word}: {result.test}", *result.message.splitlines(), *notes]
    lines += [f"cause: {cause.sentence}" for cause in report.causes if cause.origin]
    return [*lines, f"replay: {result.replay}"]


def _about_dump(dump: Path) -> str:
    if dump.exists():
        return f"explain: paged-mla explain {shlex.quote(str(dump))}"
    return f"{dump} was not written: no test failed at a step that a dump can contain"


def _of_causes(causes: Sequence[Cause], room: int) -> list[str]:
    """Return the lines about as many causes as fit into `room` lines, at least one cause."""
    lines: list[str] = []
    stated: set[str] = set()
    for number, cause in enumerate(causes):
        rule = cause.symptom.rule
        own = _of_cause(number + 1, cause, RULES.get(rule, "") if rule not in stated else "")
        stated.add(rule)
        rest = len(causes) - number
        if number and len(lines) + len(own) + (rest > 1) > room:
            tests = sum(len(other.tests) for other in causes[number:])
            more = "cause" if rest == 1 else "causes"
            lines.append(
                f"{rest} more {more}, of {tests} failing tests, are in the report (--report)."
            )
            break
        lines += own
    return lines


def _of_cause(number: int, cause: Cause, rule: str) -> list[str]:
    """Return the lines about a cause, with the text of its rule if `rule` is not empty."""
    smallest = cause.smallest
    about = f"smallest: {smallest.test}: {smallest.why or 'see the test'}"
    if sizes := "; ".join(filter(None, (_sizes(smallest.traits), smallest.note))):
        about += f" ({sizes})"
    lines = _wrapped(f"{number}. {cause.sentence}", 2)
    if rule:
        lines += _wrapped(f"   {cause.symptom.rule}: {rule.replace('`', '')}", 1)
    lines += _wrapped(f"   {about}", 2)
    lines += _wrapped(f"   error: {cause.error}", 2)
    if cause.fault:
        lines += _wrapped(f"   looks like: {cause.fault}", 2)
    lines.append(f"   replay: {one_line(cause.replay)}")
    if cause.has_dump:
        lines.append(f"   explain: paged-mla explain {DUMP}")
    return lines


def _sizes(traits: Mapping[str, Any]) -> str:
    """Return the sizes of a case, which help to interpret patterns of wrong elements."""
    if "work" not in traits:
        return ""
    keys = ", ".join(map(str, traits["keys"])) or "no"
    queries = "1 query token" if traits["queries"] == 1 else f"up to {traits['queries']} queries"
    heads = "1 head" if traits["heads"] == 1 else f"{traits['heads']} heads"
    return f"{heads}, blocks of {traits['block_size']}, rows of {keys} keys with {queries}"


def _wrapped(text: str, most: int) -> list[str]:
    """Return a text in at most `most` lines."""
    return textwrap.wrap(
        one_line(text),
        WIDTH,
        subsequent_indent="   ",
        max_lines=most,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _left_out(report: Report) -> list[str]:
    """Return lines about expected failures, and about tests that did not run."""
    known = [r for r in report.results if r.outcome == "expected-failure"]
    lines = [f"{FAILED_AS_EXPECTED}: {r.test}: {r.reason}" for r in known[:_MOST_KNOWN]]
    if len(known) > _MOST_KNOWN:
        lines.append(f"{len(known) - _MOST_KNOWN} more expected failures are in the report.")
    sizes = _head_sizes(report)
    most = _MOST_SKIPPED - len(sizes)
    reasons = _pooled(report.skip_reasons)
    shown = reasons if len(reasons) <= most else reasons[: most - 1]
    for reason, count in shown:
        lines.append(_short(f"{shown_outcome(SKIPPED, reason)}, {_tests(count)}: {reason}"))
    if rest := reasons[len(shown) :]:
        tests = _tests(sum(count for _, count in rest))
        words = sorted({shown_outcome(SKIPPED, reason) for reason, _ in rest})
        lines.append(f"{' or '.join(words)}, {tests}: {len(rest)} other reasons, in the report")
    return lines + sizes


def _head_sizes(report: Report) -> list[str]:
    """Return a line about declared head sizes that a whole run does not test, if there are any."""
    left_out = report.subject.head_dims_left_out
    if report.partial or not left_out:
        return []
    sizes = ", ".join(map(str, left_out))
    names = sorted({name for name in left_out.values() if name})
    how = f"; use --dims {' or --dims '.join(names)}" if names else ""
    return [_short(f"skipped: the declared head sizes {sizes} need a run of their own{how}")]


def _tests(count: int) -> str:
    return "1 test" if count == 1 else f"{count} tests"


def _pooled(reasons: Mapping[str, int]) -> list[tuple[str, int]]:
    """Join reasons of one kind; return each with its count, the most frequent first.

    If a reason names several capabilities, only the first counts. The values of a capability that
    are not declared are listed.
    """
    counts: Counter[tuple[str, str]] = Counter()
    values: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for reason, count in reasons.items():
        undeclared = _UNDECLARED.match(reason)
        kind = (undeclared[1], undeclared[3]) if undeclared else (reason, "")
        counts[kind] += count
        if undeclared:
            values[kind][undeclared[2]] = None
    return [
        (f"{name} {_listed(values[kind])} not declared {status}" if status else name, count)
        for kind, count in counts.most_common()
        for name, status in [kind]
    ]


def _listed(values: Iterable[str]) -> str:
    """Return the values in sorted order, separated by commas; numbers are sorted by size."""
    return ", ".join(
        sorted(values, key=lambda value: (len(value) if value.isdecimal() else 0, value))
    )


def _around(report: Report) -> list[str]:
    """Return lines about warnings, an early end, and the reasons against the backend."""
    lines: list[str] = []
    if report.warnings:
        total = sum(warned.count for warned in report.warnings.values())
        text, warned = next(iter(report.warnings.items()))
        said = _short(text.partition("\n")[0])
        many = "1 warning" if total == 1 else f"{total} warnings"
        lines.append(f"{many} from the backend; the first ({warned.first}): {said}")
    if report.stopped:
        lines.append(report.stopped)
    against = _against(report)
    shown = against if len(against) <= _MOST_AGAINST else against[: _MOST_AGAINST - 1]
    lines += [f"problem: {reason}" for reason in shown]
    if len(against) > len(shown):
        lines.append(f"problem: {len(against) - len(shown)} other reasons, in the report")
    return lines


def _against(report: Report) -> list[str]:
    """Return the reasons against the backend; core capabilities of one kind are joined.

    A reason with the last output of a process is long. If tests failed, it is shortened.
    """
    lacking = [r for r in report.reasons_against if r.startswith(CORE_MISSING)]
    pooled = _pooled({reason.removeprefix(CORE_MISSING): 1 for reason in lacking})
    others = [reason for reason in report.reasons_against if reason not in lacking]
    if any(result.fails for result in report.results):
        others = ["\n".join(reason.split("\n")[:_MOST_OF_A_REASON]) for reason in others]
    return [*others, *(_short(f"{CORE_MISSING}{reason}") for reason, _ in pooled)]


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
