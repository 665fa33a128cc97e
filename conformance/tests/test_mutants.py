"""The run of mutants reports mutants that the suite does not find."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from paged_mla_conformance.meta.mutants import MUTANTS, __main__, backends
from paged_mla_conformance.meta.mutants.backends import broken_engine, mutant
from paged_mla_conformance.meta.mutants.kill import Kills, NothingAsked, kill
from paged_mla_conformance.meta.mutants.matrix import Matrix
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS
from paged_mla_reference.faults import FaultClass
from paged_mla_reference.faults.reports import PROJECTS, link
from paged_mla_reference.rules import RULES

PAGE = Path(__file__).parent.parent / "docs" / "mutants.md"


@pytest.mark.parametrize("fault_class", FaultClass, ids=lambda fault_class: fault_class.name)
def test_every_class_of_faults_has_a_mutant(fault_class: FaultClass):
    """Every class of faults has a mutant."""
    assert any(fault.fault_class is fault_class for fault in MUTANTS.values())


def test_the_list_is_long_and_its_rules_exist():
    """The list has at least 80 mutants of all kinds."""
    assert len(MUTANTS) >= 80
    assert all(set(fault.rules) <= set(RULES) for fault in MUTANTS.values())


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("lse-in-base-2", "decode"),
        ("the-peak-is-raised-to-a-power-of-two", "exact"),
        ("weights-are-cut-off", "exact"),  # only by its mean square
        ("chunk-partials-in-two-bases", "prefill"),
        ("prefill-lse-is-in-base-2", "layer"),
        ("query-scales-are-inverted", "queries"),
        ("answers-share-one-buffer", "replay"),
        ("splits-follow-the-longest-row", "batch_invariant"),
        ("hash-ignores-the-last-token", "trace"),
        ("bad-input-is-swallowed", "errors"),
        ("positions-in-front-of-rows-are-written", "bounded"),
        ("empty-partials-are-multiplied-by-zero", "merge"),
        ("padding-past-256-tokens-is-not-written", "empty"),  # only by a case of many rows
    ],
)
def test_a_mutant_is_killed(name: str, group: str):
    """S-7, S-8, S-11, S-13, S-17, S-20, S-21: the group for its kind kills each mutant."""
    kills = kill(name, "-k", f"test_{group}")
    assert kills.by() == [group]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("a-live-block-is-evicted", "trace-preemption-fp32"),
        ("partial-blocks-are-published", "trace-lookalikes-fp32"),
    ],
)
def test_a_schedule_that_breaks_a_rule_is_a_failure(name: str, schedule: str):
    """S-13: a right backend refuses the step of a wrong engine."""
    assert kill(name, "-k", schedule).by() == ["trace"]


def test_the_right_backend_is_not_killed():
    """The suite does not fail the right backend."""
    assert kill("right", "-k", "test_decode or test_merge").groups == {}


def test_a_mutant_that_no_test_can_see_survives():
    """S-17: tests with one step do not find a fault between steps."""
    name = "answers-share-one-buffer"
    kills = kill(name, "-k", "test_decode")
    assert Matrix([kills], Kills("right")).faults == [f"{name} survives"]


def test_a_suite_that_does_not_run_is_an_error():
    """S-20: a mutant on which no test ran has not survived."""
    with pytest.raises(NothingAsked, match="no test of the suite ran on lse-in-base-2"):
        kill("lse-in-base-2", "-k", "no_test_is_called_so")


def test_a_choice_of_no_test_is_an_error(capsys: pytest.CaptureFixture[str]):
    """The command names the expression that matches no test."""
    with pytest.raises(SystemExit):
        __main__.main(["lse-in-base-2", "--workers", "1", "-k", "no_test_is_called_so"])
    assert "-k: got 'no_test_is_called_so': no test of the suite ran" in capsys.readouterr().err


def test_a_crash_is_not_a_kill():
    """S-5: an exception or an assertion of another rule does not count as a kill."""
    kills = Kills("lse-in-base-2", {"decode": {"crash": "test_decode[decode-h1-fp32]"}})
    [fault] = Matrix([kills], Kills("right")).faults
    assert "but no assertion of a rule that it breaks" in fault


def test_a_failure_of_the_right_backend_is_a_defect_of_the_suite():
    """A test that always fails is wrong."""
    right = Kills("right", {"decode": {"other": "test_decode[decode-h1-fp32]"}})
    [fault] = Matrix([], right).faults
    assert fault.startswith("the right backend fails")


def killed(name: str) -> Kills:
    """Return the kills of a mutant that one test kills."""
    return Kills(name, {"decode": {"rule": "test_decode[decode-h1-fp32]"}})


def test_the_page_names_every_mutant_with_its_reports(tmp_path: Path):
    """The page and its JSON come from one matrix."""
    page = tmp_path / "mutants.md"
    Matrix([killed(name) for name in MUTANTS], Kills("right")).write(page)
    document = json.loads(page.with_suffix(".json").read_text())
    assert [m["name"] for m in document["mutants"]] == list(MUTANTS)
    assert document["groups"] == list(SUITE_GROUPS)
    for name, fault in MUTANTS.items():
        assert f"| `{name}` |" in page.read_text()
        assert all(f"[{c}]({link(c)})" in page.read_text() for c in fault.citations)
        assert all(f"akin to [{c}]({link(c)})" in page.read_text() for c in fault.akin)


def test_the_committed_summary_is_that_of_the_list():
    """It counts every mutant as killed."""
    all_killed = Matrix([killed(name) for name in MUTANTS], Kills("right"))
    assert PAGE.read_text().startswith(all_killed.summary_page())


def test_every_project_is_cited():
    """Each citation is of a known project, and each known project is cited."""
    cited = {re.split("[#@]", c)[0] for d in MUTANTS.values() for c in (*d.citations, *d.akin)}
    assert cited == set(PROJECTS)


def test_the_command_takes_names(capsys: pytest.CaptureFixture[str]):
    """S-7: the command prints one mutant with the groups that kill it."""
    assert __main__.main(["lse-in-base-2", "--workers", "2", "-k", "test_decode"]) == 0
    printed = capsys.readouterr().out
    assert "lse-in-base-2: decode\n" in printed
    assert "1 of 1 mutants killed" in printed


@pytest.mark.parametrize("part", [["lse-in-base-2"], ["-k", "test_decode"]])
def test_a_page_of_a_part_is_an_error(part: list[str], capsys: pytest.CaptureFixture[str]):
    """A page needs the results of every mutant and every test."""
    with pytest.raises(SystemExit):
        __main__.main([*part, "--page", "mutants.md"])
    assert (
        "--page, --summary and --table need every mutant and every test" in capsys.readouterr().err
    )


def test_an_unknown_mutant_is_an_error():
    """The command and the module of backends refuse an unknown name."""
    with pytest.raises(SystemExit):
        __main__.main(["no-such-mutant"])
    with pytest.raises(AttributeError, match="no mutant has the name"):
        getattr(backends, "no-such-mutant")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("lse-in-base-2", {"attend"}),
        ("chunk-partials-in-two-bases", {"prefill"}),
        ("pairing-is-always-interleaved", {"append", "attend"}),
        ("context-is-added-twice", {"plan"}),
        ("hash-ignores-the-parent", {backends.SCHEDULES}),
        ("lengths-lose-their-sign", {backends.BOUNDED}),
        (
            "answers-share-one-buffer",
            {
                "plan",
                "append",
                "attend",
                "merge",
                "gather_context",
                "quantize_queries",
                "prefill",
                "layer",
            },
        ),
    ],
)
def test_what_a_mutant_changes_is_known(name: str, changed: set[str]):
    """S-20: tests of other operations do not run, because the mutant does not change them."""
    assert backends.changes(name) == changed


def test_engine_mutants_are_right_backends():
    """S-13: their fault is in the schedules that they run."""
    assert mutant("hash-ignores-the-parent").oracle == mutant("right").oracle
    with broken_engine("lse-in-base-2") as nothing:
        assert nothing is None
