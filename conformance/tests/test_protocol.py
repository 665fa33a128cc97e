"""A violation of the protocol is reported directly, before a rule detects its consequences."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import meddling
import numpy as np
import pytest
from running import FEW, NINE_HEADS, last_line, report_of, result_of

from paged_mla_conformance.meta.mutants.backends import MutantBackend, mutant
from paged_mla_conformance.meta.mutants.kill import kill
from paged_mla_conformance.runners.protocol_guard import (
    GuardedBackend,
    GuardedRunner,
    ProtocolBroken,
)
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases import GROUPS, PREFILLS
from paged_mla_shared.dims import SMALL
from paged_mla_shared.operation import Operation
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Batch, Output


def guarded(backend: str) -> GuardedBackend:
    """Return a backend of meddling.py whose calls are checked."""
    return GuardedBackend(getattr(meddling, backend)(), Counter())


def call_everything(backend: GuardedBackend) -> None:
    """Make every call of the protocol once."""
    [case] = [c for c in GROUPS["decode"] if c.name == "h9"]
    [stage] = Trial(backend, case, SMALL, "float32").stages()
    runner = backend.prepare(stage.problem)
    runner.load_cache(stage.before)
    runner.plan(stage.batch)
    runner.append(stage.batch)
    answer = runner.attend(stage.batch)
    runner.merge([Output(answer.out.copy(), answer.lse.copy())])
    runner.gather_context(stage.batch)
    runner.quantize_queries(stage.batch, None)
    runner.read_cache(np.arange(2, dtype=np.int64))
    [case] = [c for c in PREFILLS if c.name == "ragged"]
    [batch] = build_prefills(case, SMALL, "float32")
    backend.prepare(case.problem(SMALL, "float32")).prefill(batch)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("writes-queries", "[S-10] attend wrote to its input q_nope: first at (0, 0, 0)"),
        ("writes-lengths", "[S-10] plan wrote to its input seq_lens: first at (3,)"),
        ("writes-latents", "[S-10] append wrote to its input k_pe: first at (0, 0)"),
        ("writes-the-image", "[S-10] load_cache wrote to its input blocks: first at (0, 0)"),
        ("writes-the-image-later", "[S-10] append wrote to the loaded image's blocks: first at "),
        ("writes-partials", "[S-10] merge wrote to its input partials[0].lse: first at (0, 0)"),
        ("writes-keys", "[S-10] prefill wrote to its input k_nope: first at (0, 0, 0)"),
        ("scales-queries", "[S-10] quantize_queries wrote to its input q_pe: first at (0, 0, 0)"),
        ("prefills-with-its-input", "[S-17] prefill: out shares memory with its input v"),
        ("answers-with-its-input", "[S-17] attend: out shares memory with its input q_nope"),
    ],
)
def test_inputs_do_not_change(backend: str, message: str):
    """S-10, S-17: the error names the call and the array."""
    with pytest.raises(Mismatch, match=re.escape(message)):
        call_everything(guarded(backend))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("returns-none", "attend returned a NoneType; the protocol requires Output"),
        ("returns-a-tuple", "attend returned a tuple; the protocol requires Output"),
        ("returns-lists", "attend returned out as a list; the protocol requires a NumPy array"),
        ("returns-masked-arrays", "attend returned out as a numpy.ma.MaskedArray"),
        ("returns-flat-answers", "attend returned out with 2 axes; the protocol requires 3"),
        ("plans-a-dict", "plan returned a dict; the protocol requires Metadata"),
        (
            "reads-bytes",
            "read_cache returned blocks as a bytes; the protocol requires a NumPy array",
        ),
        ("reads-words", "read_cache returned int32; the protocol requires uint8"),
        ("quantizes-alone", "quantize_queries returned 1 values; the protocol requires 2"),
        (
            "gathers-one-array",
            "gather_context returned a numpy.ndarray; the protocol requires tuple",
        ),
        ("skips", "backend raised Skipped (not today) in attend"),
        ("skips-as-unittest", "backend raised SkipTest (not today) in attend"),
        ("xfails", "backend raised XFailed (known) in attend"),
        ("exits-pytest", "backend raised Exit (enough) in attend"),
        ("exits-python", "backend raised SystemExit (0) in attend"),
        ("interrupts", "backend raised KeyboardInterrupt () in attend"),
        ("skips_in_prepare", "backend raised Skipped (not today) in prepare"),
    ],
)
def test_violations_of_the_protocol_are_named(backend: str, message: str):
    """S-20: a wrong type, and an attempt to end or skip a test, are errors."""
    with pytest.raises(ProtocolBroken, match=re.escape(message)):
        call_everything(guarded(backend))


@pytest.mark.parametrize(
    ("found", "message"),
    [([1, 2], "counts as a list"), (np.zeros((2, 1), np.int32), "counts with 2 axes")],
)
def test_a_result_may_be_one_array(found: object, message: str):
    """S-20: the guard also checks operations that return one array."""
    count = Operation(name="count", takes=Batch, returns=np.ndarray, arrays={"counts": 1})
    [case] = [c for c in GROUPS["decode"] if c.name == "h9"]
    [stage] = Trial(MutantBackend(), case, SMALL, "float32").stages()
    right = GuardedRunner(SimpleNamespace(count=lambda _: np.zeros(2, np.int32)), Counter())
    assert right.call(count, stage.batch).tolist() == [0, 0]
    wrong = GuardedRunner(SimpleNamespace(count=lambda _: found), Counter())
    with pytest.raises(ProtocolBroken, match=f"count returned {message}"):
        wrong.call(count, stage.batch)


def test_an_exception_keeps_its_type_and_names_the_call():
    """S-20: the type of an exception is kept, because tests of bad input check it."""
    with pytest.raises(NotImplementedError, match="no such kernel") as raised:
        call_everything(guarded("raises"))
    assert raised.value.__notes__ == ["backend raised NotImplementedError in attend"]


def test_an_earlier_output_stays_as_long_as_it_is_referenced():
    """S-17: only memory of outputs without a reference may be used again."""
    backend = GuardedBackend(mutant("answers-share-one-buffer"), Counter())
    [case] = [c for c in GROUPS["decode"] if c.name == "h9"]
    [stage] = Trial(backend, case, SMALL, "float32").stages()
    runner = backend.prepare(stage.problem)
    runner.load_cache(stage.after)
    runner.attend(stage.batch)
    held = runner.attend(stage.batch)
    with pytest.raises(Mismatch, match="out shares memory with an earlier out of attend"):
        runner.attend(stage.batch)
    assert held is not None


@pytest.mark.parametrize("backend", ["skips", "skips_in_prepare", "xfails", "exits-pytest"])
def test_a_backend_cannot_skip_tests(backend: str, tmp_path: Path):
    """S-20: every test that the backend tries to skip is a failure."""
    report = report_of(tmp_path, "--backend", f"meddling:{backend}", *FEW)
    assert report["status"] == 1
    assert report["totals"]["failed"] == report["totals"]["all"] == 4
    assert "end" not in result_of(report, NINE_HEADS)  # its process returned


def test_a_shared_buffer_is_killed_by_its_rule():
    """S-17: an output overwrites an earlier output that is still referenced."""
    assert kill("answers-share-one-buffer", "-k", "test_replay").by() == ["replay"]


def test_warnings_are_counted_and_are_not_failures(tmp_path: Path):
    """S-20: the report and the screen show the warnings of a backend."""
    report = report_of(tmp_path, "--backend", "meddling:warns", *FEW)
    assert report["status"] == 0
    [warned] = report["warnings"]
    assert warned["count"] == 8
    assert warned["message"].startswith("RuntimeWarning: slow path (meddling.py:")
    assert warned["first"] in {r["test"] for r in report["results"]}
    line = rf"8 warnings from the backend; the first \({re.escape(warned['first'])}\): Runtime"
    assert re.search(line, report["printed"])


def test_a_warning_while_loaded_is_shown(tmp_path: Path):
    """S-20: warnings before the first test are also shown."""
    report = report_of(tmp_path, "--backend", "meddling:warns_while_loaded", *FEW)
    assert [w["first"] for w in report["warnings"]] == ["while the backend was loaded"]


def test_an_exception_names_call_and_case(tmp_path: Path):
    """S-20: the screen and the report name both."""
    report = report_of(tmp_path, "--backend", "meddling:raises", *FEW)
    assert "no such kernel" in result_of(report, NINE_HEADS)["message"]
    [cause] = report["causes"]
    assert NINE_HEADS in cause["tests"]
    assert cause["smallest"] in report["printed"]
    assert "backend raised NotImplementedError in attend" in report["printed"]
    assert last_line(report["printed"]) == report["verdict"]


@pytest.mark.parametrize("strides", ["columns", "backwards", "gaps"])
def test_outputs_may_have_any_strides(strides: str, tmp_path: Path):
    """S-20: outputs of all calls, also of caches with rotated keys and with scales."""
    chosen = "test_rope or formats-rope or queries-rope or gather-strided"
    backend = f"unusual:{strides}"
    report = report_of(tmp_path, "--backend", backend, "--dtypes", "bfloat16", "-k", chosen)
    failed = [result["test"] for result in report["results"] if result["outcome"] == "failed"]
    assert not failed
    assert {result["group"] for result in report["results"]} >= {"rope", "formats", "gather"}


def test_a_right_backend_passes_the_guard():
    """S-20: every call of a right backend passes without a warning."""
    warned: Counter[str] = Counter()
    right = MutantBackend()
    backend = GuardedBackend(right, warned)
    assert (backend.name, backend.mode) == (right.name, right.mode)
    assert backend.capabilities is right.capabilities
    call_everything(backend)
    assert not warned


def test_characters_that_cannot_be_encoded_do_not_prevent_a_verdict(tmp_path: Path):
    """S-20: a message of a backend is escaped where the screen or a file cannot encode it."""
    chosen = ("--backend", "meddling:raises-strangely", "--only", NINE_HEADS)
    report = report_of(tmp_path, *chosen, PYTHONIOENCODING="ascii")
    assert "\\u03bcs, a byte of a path: \\udc80" in report["printed"]
    assert last_line(report["printed"]) == report["verdict"]
    page, suite = ((tmp_path / f"report.{kind}").read_text("utf-8") for kind in ("html", "xml"))
    assert "\N{GREEK SMALL LETTER MU}s, a byte of a path: " in page
    assert "\N{GREEK SMALL LETTER MU}s, a byte of a path: ?" in suite
