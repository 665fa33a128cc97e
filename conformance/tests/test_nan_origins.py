"""A run finds the origin of a NaN from the results of its test over other memory."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from typing import Any

import pytest

from paged_mla_conformance.run import nan_origins
from paged_mla_conformance.run.options import parse
from paged_mla_conformance.run.reports.nan_origin import NanOrigin
from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.run.workers.progress import Progress

MISMATCH = "E   paged_mla_reference.tolerance.compare.Mismatch: "
NAN = f"{MISMATCH}[S-9] out: nan at (0, 0, 0), where"
WRONG = f"{MISMATCH}[S-5] out: 2 elements past their budget"
WILD = (
    "E   AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    "E   backend raised AcceleratorError in attend"
)
OPTIONS, QUIET = parse(["--backend", "a:b"]), Progress(io.StringIO())
SURROUNDED, BARE = Subject("a:b", has_surroundings=True), Subject("a:b", has_surroundings=False)


def result(message: str, outcome: str = "failed") -> Result:
    return Result("test_decode[a]", "decode", ["S-9"], "", outcome, message=message)


def varied_by(given: tuple[Any, ...], environment: dict[str, str] | None) -> str:
    """Return the difference between a run of a test and its first run."""
    if environment:
        return environment[nan_origins.SURROUNDINGS]
    return "stale" if any("stale" in str(argument) for argument in given[3:]) else "unchanged"


@pytest.mark.parametrize("message", ["", WRONG], ids=["it passes", "it fails without a NaN"])
@pytest.mark.parametrize(
    ("removes", "mode", "subject", "origin"),
    [
        ("stale", "gpu", SURROUNDED, NanOrigin.UNREAD),
        ("zeros-in-buffers", "cpu", SURROUNDED, NanOrigin.BUFFERS),
        ("zeros-in-guard-zones", "cpu", SURROUNDED, NanOrigin.GUARD_ZONES),
        ("zeros-in-shared-memory", "gpu", SURROUNDED, NanOrigin.SHARED_MEMORY),
        ("zeros-in-late-inputs", "gpu", SURROUNDED, NanOrigin.LATE_INPUTS),
        ("nothing", "gpu", SURROUNDED, NanOrigin.COMPUTED),
        ("nothing", "cpu", SURROUNDED, NanOrigin.COMPUTED),
        ("zeros-in-buffers", "gpu", BARE, NanOrigin.NOT_UNREAD),
    ],
)
def test_the_memory_whose_zeros_remove_a_nan_is_its_origin(
    monkeypatch: pytest.MonkeyPatch,
    removes: str,
    mode: str,
    subject: Subject,
    origin: NanOrigin,
    message: str,
):
    """S-9: memory that only a GPU has is not varied on a CPU."""
    varied = []

    def run_again(*given: Any, environment: dict[str, str] | None = None) -> Result:
        value = varied_by(given, environment)
        varied.append(value)
        if value != removes:
            return result(NAN)
        return result(message, "failed" if message else "passed")

    monkeypatch.setattr(nan_origins, "ask_again", run_again)
    report = Report(replace(subject, mode=mode), results=[result(NAN)])
    nan_origins.find_nan_origins(OPTIONS, report, QUIET)
    assert report.nan_origins == {"test_decode[a]": origin}
    assert mode == "gpu" or "zeros-in-shared-memory" not in varied


@pytest.mark.parametrize("again", [None, "skipped"])
def test_a_test_that_does_not_run_again_has_no_origin(
    monkeypatch: pytest.MonkeyPatch, again: str | None
):
    """S-9: the report does not guess."""
    skipped = result("", "skipped")
    monkeypatch.setattr(nan_origins, "ask_again", lambda *_, **__: skipped if again else None)
    report = Report(Subject("a:b"), results=[result(NAN)])
    nan_origins.find_nan_origins(OPTIONS, report, QUIET)
    assert report.nan_origins == {}


@pytest.mark.parametrize(
    ("removes", "origin"),
    [
        ("stale", NanOrigin.UNREAD),
        ("zeros-in-shared-memory", NanOrigin.SHARED_MEMORY),
        ("nothing", None),
    ],
)
def test_a_wild_address_can_come_from_memory_too(
    monkeypatch: pytest.MonkeyPatch, removes: str, origin: NanOrigin | None
):
    """S-9: an index in memory that the kernel has not written may be any number."""

    def run_again(*given: Any, environment: dict[str, str] | None = None) -> Result:
        value = varied_by(given, environment)
        return result("", "passed") if value == removes else result(WILD)

    monkeypatch.setattr(nan_origins, "ask_again", run_again)
    report = Report(replace(SURROUNDED, mode="gpu"), results=[result(WILD)])
    nan_origins.find_nan_origins(OPTIONS, report, QUIET)
    assert report.nan_origins.get("test_decode[a]") == origin


def test_a_symptom_that_does_not_appear_again_has_no_origin(monkeypatch: pytest.MonkeyPatch):
    """S-9: the zeros or chance may have removed the symptom."""

    def run_again(*given: Any, environment: dict[str, str] | None = None) -> Result:
        shows = varied_by(given, environment) == "stale"
        return result(NAN) if shows else result("", "passed")

    monkeypatch.setattr(nan_origins, "ask_again", run_again)
    report = Report(replace(SURROUNDED, mode="gpu"), results=[result(NAN)])
    nan_origins.find_nan_origins(OPTIONS, report, QUIET)
    assert report.nan_origins == {}


def of_three_causes() -> list[Result]:
    """Return failing tests whose symptoms differ, so that each of them can run again."""
    names = ("out", "lse", "merged")
    return [
        replace(result(NAN.replace("out", name)), test=f"test_decode[{name}]") for name in names
    ]


def test_an_origin_that_is_known_is_tried_first(monkeypatch: pytest.MonkeyPatch):
    """S-9: the causes of one run often have one origin, and each run loads the backend again."""
    varied = []

    def run_again(*given: Any, environment: dict[str, str] | None = None) -> Result:
        varied.append(varied_by(given, environment))
        return result("", "passed") if varied[-1] == "zeros-in-shared-memory" else result(NAN)

    monkeypatch.setattr(nan_origins, "ask_again", run_again)
    report = Report(replace(SURROUNDED, mode="gpu"), results=of_three_causes()[:2])
    nan_origins.find_nan_origins(OPTIONS, report, QUIET)
    first = ["stale", "zeros-in-buffers", "zeros-in-shared-memory", "unchanged"]
    assert varied == [*first, "stale", "zeros-in-shared-memory", "unchanged"]


def test_the_time_for_more_runs_is_limited(monkeypatch: pytest.MonkeyPatch):
    """S-9: a backend that takes long to load does not delay the report by minutes."""
    seconds = itertools.count(step=40.0)
    monkeypatch.setattr(nan_origins.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(nan_origins, "ask_again", lambda *_, **__: result("", "passed"))
    screen = io.StringIO()
    report = Report(SURROUNDED, results=of_three_causes())
    nan_origins.find_nan_origins(OPTIONS, report, Progress(screen))
    assert len(report.nan_origins) == 1
    assert "running test_decode[" in screen.getvalue()
