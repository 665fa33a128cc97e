"""The symptom of a failed test: few words that are the same for all failures of one bug."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paged_mla_conformance.run.reports.result import Result, error_of

NAN = "NaN"
WILD_ADDRESS = "an address outside the memory of the device"

_RULE = re.compile(r"\[(S-\d+)\] ([^:\[\]]+): ")
_WILD = re.compile(r"illegal memory access|misaligned address")  # messages of CUDA
_RAISED = re.compile(r"backend raised \w+ in (\w+)")
_EXCEPTION = re.compile(r"^(?:\w+\.)*(\w+): ")
_NUMBER = re.compile(r"-?\b\d[\d.]*(?:e[+-]?\d+)?\b")
_KINDS = (
    (r"nan at", NAN),
    (r"-inf at", "-inf"),
    (r"inf at", "+inf"),
    (r".* elements past their budget, first at \([^()]*\): nan,", NAN),
    (r".* elements past their budget", "error too large"),
    (r"root mean square error", "root mean square error too large"),
    (r"not 0, where", "not 0 where the query sees no key"),
    (r"-?[\d.]+(e[+-]?\d+)? at \(.*, expected -inf", "finite where the query sees no key"),
    (r"0, where", "0 where the query sees keys"),
    (r"bits differ", "other bits"),
    (r"shape", "a wrong shape"),
    (r"dtype", "a wrong element type"),
    (r".* bytes wrong", "wrong bytes"),
    (r"first wrong at", "wrong numbers"),
    (r"first at", "changed bytes"),
    (r"token \d+ changed", "a token that a query does not see changes its output"),
    (r"token \d+ did not change", "a token that a query sees does not change its output"),
)
_LONGEST = 90  # characters of a kind


@dataclass(frozen=True)
class Symptom:
    """What is wrong in a failed test.

    Parameters
    ----------
    rule : str
        The broken rule; "" if the failure does not show one.
    what : str
        The quantity that is wrong, or the call that failed; may be "".
    kind : str
        The kind of the error.
    """

    rule: str
    what: str
    kind: str

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.rule, self.what) if part)
        return f"{place}: {self.kind}" if place else self.kind


def symptom_of(result: Result) -> Symptom:
    """Return the symptom of a test that failed."""
    if result.outcome == "unexpected-pass":
        return Symptom("", "", "passed although its failure is expected")
    if result.end == "timed-out":
        return Symptom("", "", "no result within the time limit")
    if result.end == "died":
        how = result.message.partition("\n")[0].removesuffix(" during this test")
        return Symptom("", "", _general(how) or "the process died")
    line = error_of(result.message)
    if places := list(_RULE.finditer(line)):
        return Symptom(places[-1][1], places[-1][2], _kind(line[places[-1].end() :]))
    raised = _RAISED.search(line)
    what = raised[1] if raised else ""
    if _WILD.search(line):
        return Symptom("S-9", what, WILD_ADDRESS)
    return Symptom("", what, _of_exception(line))


def detail_of(result: Result) -> str:
    """Return the error of a failed test, without the rule and the quantity that it names."""
    line = error_of(result.message)
    places = list(_RULE.finditer(line))
    return line[places[-1].end() :] if places else _EXCEPTION.sub(r"\1: ", line)


def _kind(detail: str) -> str:
    for pattern, kind in _KINDS:
        if re.match(pattern, detail):
            return kind
    return _general(re.split(r"[:;,(]", detail)[0])


def _of_exception(line: str) -> str:
    if "DID NOT RAISE" in line:
        return "bad input was accepted without an error"
    text = _general(line.partition("; backend raised")[0])
    named = _EXCEPTION.match(text)
    if named is None:
        return text
    if named[1] in {"AssertionError", "Failed"}:
        return text[named.end() :]
    return f"exception {named[1]}: {text[named.end() :]}"


def _general(text: str) -> str:
    """Replace each number by N, since failures of one bug differ in numbers; shorten long text."""
    text = _NUMBER.sub("N", text.strip())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()} ..."
