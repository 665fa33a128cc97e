"""What a backend may not do is said as that, whatever rule would have noticed it next."""

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
    """Return one of the backends of meddling.py under guard."""
    return GuardedBackend(getattr(meddling, backend)(), Counter())


def call_everything(backend: GuardedBackend) -> None:
    """Ask everything once."""
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
        ("writes-queries", "[S-10] attend wrote its input q_nope: first at (0, 0, 0)"),
        ("writes-lengths", "[S-10] plan wrote its input seq_lens: first at (3,)"),
        ("writes-latents", "[S-10] append wrote its input k_pe: first at (0, 0)"),
        ("writes-the-image", "[S-10] load_cache wrote its input blocks: first at (0, 0)"),
        ("writes-the-image-later", "[S-10] append wrote the loaded image's blocks: first at "),
        ("writes-partials", "[S-10] merge wrote its input partials[0].lse: first at (0, 0)"),
        ("writes-keys", "[S-10] prefill wrote its input k_nope: first at (0, 0, 0)"),
        ("scales-queries", "[S-10] quantize_queries wrote its input q_pe: first at (0, 0, 0)"),
        ("prefills-with-its-input", "[S-17] prefill: out lies in its input v"),
        ("answers-with-its-input", "[S-17] attend: out lies in its input q_nope"),
    ],
)
def test_inputs_stay_as_they_were(backend: str, message: str):
    """S-10, S-17: the call and the array are named, whatever rule would have noticed it next."""
    with pytest.raises(Mismatch, match=re.escape(message)):
        call_everything(guarded(backend))


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("returns-none", "attend returned a NoneType; the protocol has a Output"),
        ("returns-a-tuple", "attend returned a tuple; the protocol has a Output"),
        ("returns-lists", "attend returned out as a list; the protocol has a NumPy array"),
        ("returns-masked-arrays", "attend returned out as a numpy.ma.MaskedArray"),
        ("returns-flat-answers", "attend returned out with 2 axes; the protocol has 3"),
        ("plans-a-dict", "plan returned a dict; the protocol has a Metadata"),
        ("reads-bytes", "read_cache returned blocks as a bytes; the protocol has a NumPy array"),
        ("reads-words", "read_cache returned int32; the protocol has uint8"),
        ("quantizes-alone", "quantize_queries returned 1 values; the protocol has 2"),
        ("gathers-one-array", "gather_context returned a numpy.ndarray; the protocol has a tuple"),
        ("skips", "backend raised Skipped (not today) in attend"),
        ("skips-as-unittest", "backend raised SkipTest (not today) in attend"),
        ("xfails", "backend raised XFailed (known) in attend"),
        ("exits-pytest", "backend raised Exit (enough) in attend"),
        ("exits-python", "backend raised SystemExit (0) in attend"),
        ("interrupts", "backend raised KeyboardInterrupt () in attend"),
        ("skips_in_prepare", "backend raised Skipped (not today) in prepare"),
    ],
)
def test_what_the_protocol_does_not_have_is_named(backend: str, message: str):
    """S-20: a wrong type is said as that; whatever would end or excuse a test is an error."""
    with pytest.raises(ProtocolBroken, match=re.escape(message)):
        call_everything(guarded(backend))


@pytest.mark.parametrize(
    ("found", "message"),
    [([1, 2], "counts as a list"), (np.zeros((2, 1), np.int32), "counts with 2 axes")],
)
def test_a_result_may_be_one_array(found: object, message: str):
    """S-20: an operation that is declared so, whoever made it up."""
    count = Operation(name="count", takes=Batch, returns=np.ndarray, arrays={"counts": 1})
    [case] = [c for c in GROUPS["decode"] if c.name == "h9"]
    [stage] = Trial(MutantBackend(), case, SMALL, "float32").stages()
    right = GuardedRunner(SimpleNamespace(count=lambda _: np.zeros(2, np.int32)), Counter())
    assert right.call(count, stage.batch).tolist() == [0, 0]
    wrong = GuardedRunner(SimpleNamespace(count=lambda _: found), Counter())
    with pytest.raises(ProtocolBroken, match=f"count returned {message}"):
        wrong.call(count, stage.batch)


def test_an_exception_keeps_its_type_and_names_the_call():
    """S-20: refusals are judged by their type."""
    with pytest.raises(NotImplementedError, match="no such kernel") as raised:
        call_everything(guarded("raises"))
    assert raised.value.__notes__ == ["backend raised NotImplementedError in attend"]


def test_an_earlier_answer_stays_as_long_as_somebody_holds_it():
    """S-17: memory that nobody reads any more may serve again."""
    backend = GuardedBackend(mutant("answers-share-one-buffer"), Counter())
    [case] = [c for c in GROUPS["decode"] if c.name == "h9"]
    [stage] = Trial(backend, case, SMALL, "float32").stages()
    runner = backend.prepare(stage.problem)
    runner.load_cache(stage.after)
    runner.attend(stage.batch)
    held = runner.attend(stage.batch)
    with pytest.raises(Mismatch, match="out lies where out of attend lay before"):
        runner.attend(stage.batch)
    assert held is not None


@pytest.mark.parametrize("backend", ["skips", "skips_in_prepare", "xfails", "exits-pytest"])
def test_no_backend_excuses_itself(backend: str, tmp_path: Path):
    """S-20: every test that it would have left out is a failure."""
    report = report_of(tmp_path, "--backend", f"meddling:{backend}", *FEW)
    assert report["status"] == 1
    assert report["totals"]["failed"] == report["totals"]["all"] == 4
    assert "end" not in result_of(report, NINE_HEADS)  # its process returned


def test_a_shared_buffer_is_killed_by_its_rule():
    """S-17: an answer written over an earlier one that somebody holds."""
    assert kill("answers-share-one-buffer", "-k", "test_replay").by() == ["replay"]


def test_warnings_are_counted_and_no_failures(tmp_path: Path):
    """S-20: a backend may warn; the report and the screen show it."""
    report = report_of(tmp_path, "--backend", "meddling:warns", *FEW)
    assert report["status"] == 0
    [warned] = report["warnings"]
    assert warned["count"] == 8
    assert warned["message"].startswith("RuntimeWarning: slow path (meddling.py:")
    assert warned["first"] in {r["test"] for r in report["results"]}
    assert "8 warnings of the backend, first: RuntimeWarning: slow path" in report["printed"]


def test_a_warning_while_loaded_is_shown(tmp_path: Path):
    """S-20: before the first test too."""
    report = report_of(tmp_path, "--backend", "meddling:warns_while_loaded", *FEW)
    assert [w["first"] for w in report["warnings"]] == ["while it was loaded"]


def test_an_exception_names_call_and_case(tmp_path: Path):
    """S-20: on the screen as in the report."""
    report = report_of(tmp_path, "--backend", "meddling:raises", *FEW)
    assert "no such kernel" in result_of(report, NINE_HEADS)["message"]
    [cause] = report["causes"]
    assert NINE_HEADS in cause["tests"]
    assert cause["smallest"] in report["printed"]
    assert "backend raised NotImplementedError in attend" in report["printed"]
    assert last_line(report["printed"]) == report["verdict"]


@pytest.mark.parametrize("strides", ["columns", "backwards", "gaps"])
def test_answers_may_have_any_strides(strides: str, tmp_path: Path):
    """S-20: what is read of a cache with a rope, of scales, of everything."""
    chosen = "test_rope or formats-rope or queries-rope or gather-strided"
    backend = f"unusual:{strides}"
    report = report_of(tmp_path, "--backend", backend, "--dtypes", "bfloat16", "-k", chosen)
    failed = [result["test"] for result in report["results"] if result["outcome"] == "failed"]
    assert not failed
    assert {result["group"] for result in report["results"]} >= {"rope", "formats", "gather"}


def test_a_right_backend_passes_the_guard():
    """S-20: it is asked everything, and nothing is held against it."""
    warned: Counter[str] = Counter()
    right = MutantBackend()
    backend = GuardedBackend(right, warned)
    assert (backend.name, backend.mode) == (right.name, right.mode)
    assert backend.capabilities is right.capabilities
    call_everything(backend)
    assert not warned


def test_letters_that_nothing_has_cost_no_verdict(tmp_path: Path):
    """S-20: what a backend says is shown as far as the screen and the files can."""
    chosen = ("--backend", "meddling:raises-strangely", "--only", NINE_HEADS)
    report = report_of(tmp_path, *chosen, PYTHONIOENCODING="ascii")
    assert "\\u03bcs, a byte of a path: \\udc80" in report["printed"]
    assert last_line(report["printed"]) == report["verdict"]
    page, suite = ((tmp_path / f"report.{kind}").read_text("utf-8") for kind in ("html", "xml"))
    assert "\N{GREEK SMALL LETTER MU}s, a byte of a path: " in page
    assert "\N{GREEK SMALL LETTER MU}s, a byte of a path: ?" in suite
