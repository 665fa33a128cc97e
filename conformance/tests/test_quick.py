"""The quick verdict: few tests, and the share of the known faults that they find."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from running import MUTANTS, REFERENCE, last_line, report_of, run_suite
from test_verdict import report

from paged_mla_conformance.meta import mutants
from paged_mla_conformance.run.quick.choice import MOST_MS, MOST_TESTS, choose
from paged_mla_conformance.run.quick.table import Entry, load_table, to_json
from paged_mla_conformance.run.reports.report import SCHEMA
from paged_mla_reference.faults import IN_16_BITS

WORTH = re.compile(r"quick: these tests find (\d+) of (\d+) known faults that apply to this back")


def entry(ms: float, *finds: str) -> Entry:
    """Return a test that takes `ms` milliseconds and finds these faults."""
    return Entry(ms, frozenset(finds))


def worth(printed: str) -> tuple[int, int]:
    """Return the two numbers of faults in the verdict."""
    [(found, findable)] = WORTH.findall(last_line(printed))
    return int(found), int(findable)


def test_the_test_that_finds_most_for_its_time_comes_first():
    table = {"slow": entry(5000, "a", "b", "c"), "fast": entry(80, "a", "b")}
    assert choose(table, table).keys == ("fast", "slow")


def test_a_test_that_finds_nothing_new_is_left_out():
    table = {"both": entry(10, "a", "b"), "one": entry(10, "a")}
    choice = choose(table, table)
    assert choice.keys == ("both",)
    assert (choice.found, choice.findable) == (2, 2)


def test_only_declared_tests_count():
    table = {"declared": entry(10, "a"), "not": entry(10, "b")}
    choice = choose(table, ["declared", "unknown"])
    assert choice.keys == ("declared",)
    assert choice.findable == 1


def test_a_test_that_takes_too_long_is_left_out_and_its_faults_are_counted():
    table = {"short": entry(10, "a"), "long": entry(MOST_MS + 1, "b")}
    choice = choose(table, table)
    assert choice.keys == ("short",)
    assert (choice.found, choice.findable) == (1, 2)


def test_there_are_never_too_many_tests():
    table = {str(number): entry(1, str(number)) for number in range(MOST_TESTS + 1)}
    assert len(choose(table, table).keys) == MOST_TESTS


def test_the_table_names_mutants_and_survives_being_written():
    table = load_table()
    assert frozenset().union(*(e.finds for e in table.values())) <= set(mutants.MUTANTS)
    written = to_json({"x": entry(1.5, "b", "a"), "y": entry(2, "b")})
    assert '"x": [1.5, "3"]' in written
    assert '"y": [2, "2"]' in written


def test_the_template_gets_a_verdict_without_any_option():
    done = run_suite("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_line(done.stdout).startswith("PASSED in part: numpy-template ")
    found, findable = worth(done.stdout)
    assert found >= 0.9 * findable


def test_a_report_has_both_numbers_and_follows_the_schema(tmp_path: Path):
    report = report_of(tmp_path, "--quick")
    found, findable = worth(report["printed"])
    assert report["quick"] == {"found": found, "findable": findable}
    document = {k: v for k, v in report.items() if k not in {"printed", "status"}}
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))


def test_a_skipped_test_finds_nothing():
    """The verdict counts only faults that the tests which ran can find."""
    found = report("passed", "skipped", "failed")
    tests = [result.test for result in found.results]
    finds = (["a", "b"], ["c"], ["b", "d"])  # of the first three; the others were not chosen
    found.findable, found.finds = 5, dict(zip(tests, finds, strict=False))
    assert found.quick.startswith("quick: these tests find 3 of 5 known faults ")


def test_a_run_that_stops_early_claims_nothing():
    done = run_suite("--backend", f"{MUTANTS}:lse-in-base-2", "--quick", "-x")
    assert done.returncode == 1
    assert not WORTH.search(last_line(done.stdout))


def test_the_tests_of_a_backend_that_declares_all_find_nine_tenths_of_the_known_faults():
    done = run_suite("--backend", REFERENCE, "--quick")
    found, findable = worth(done.stdout)
    assert found >= 0.9 * findable
    passed = int(re.findall(r"(\d+) passed", last_line(done.stdout))[0])
    assert 60 <= passed <= MOST_TESTS


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("causal-mask-is-top-left", "float32"),
        ("answers-share-one-buffer", "float32"),
        ("weights-are-cut-off", "bfloat16"),
    ],
)
def test_a_known_fault_is_found(name: str, dtype: str):
    done = run_suite("--backend", f"{MUTANTS}:{name}", "--quick", "--dtypes", dtype)
    assert done.returncode == 1
    assert last_line(done.stdout).startswith("FAILED in part: ")


def test_faults_of_16_bits_count_only_in_runs_with_16_bits():
    of_types = [
        worth(run_suite("--backend", REFERENCE, "--quick", "--dtypes", dtypes).stdout)[1]
        for dtypes in ("float32", "float32,float16")
    ]
    assert of_types[1] - of_types[0] == len(IN_16_BITS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--backend MODULE:FACTORY is missing; only --quick works without it"),
        (("--quick", "--only", "decode-bs16-fp32"), "it cannot be used with --only"),
        (("--quick", "-k", "decode"), "--quick chooses the tests; it cannot be used with -k"),
    ],
)
def test_options_that_exclude_each_other_are_refused(arguments: tuple[str, ...], said: str):
    done = run_suite(*arguments)
    assert done.returncode == 4
    assert said in done.stderr
