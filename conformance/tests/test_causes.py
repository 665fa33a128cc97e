"""Failures are pooled into causes, each with the property that separates its cases from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from paged_mla_conformance.run.reports.causes import Cause, causes_of, telling_tests
from paged_mla_conformance.run.reports.nan_origin import NanOrigin
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.reports.symptom import Symptom, symptom_of
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.suite.selection.core import CORE, Run
from paged_mla_conformance.suite.selection.traits import Traits, traits_of_case
from paged_mla_reference.backend import ReferenceBackend
from paged_mla_shared.cases import CASES

ERROR = "E   paged_mla_reference.tolerance.compare.Mismatch: "
TOO_LARGE = "[S-5] out: 9 of 16 elements past their budget, first at (0, 0, 0): 1, exact 2; row 0"
NAN = "[S-9] out: nan at (0, 0, 0), where the query sees keys; every query"
HEADS = (1, 2, 5, 8, 16, 20, 32, 128)
KEYS = (1, 16, 48, 64, 65, 100, 128, 192, 300)


def traits(heads: int, keys: int, queries: int = 1, **more: Any) -> Traits:
    """Return the traits of a case with one row."""
    return {
        "operations": ["attend"],
        "dtype": "float32",
        "heads": heads,
        "keys": [keys],
        "seen": sorted({max(keys - queries + 1, 0), keys}),
        "longest": keys,
        "shortest": keys,
        "fewest": max(keys - queries + 1, 0),
        "queries": queries,
        "rows": 1,
        "work": heads * keys * queries,
        **more,
    }


def result(number: int, known: Traits, message: str = "") -> Result:
    """Return a test that passed, or that failed with a message."""
    compared = [] if message else [{"what": "out", "error": 0.0, "budget": 1.0}]
    return Result(
        test=f"test_decode[decode-{number}-fp32]",
        group="decode",
        rules=["S-5"],
        why="because",
        outcome="failed" if message else "passed",
        message=f"here\n{ERROR}{message}" if message else "",
        replay=f"paged-mla --only {number}",
        checks=compared,
        traits=known,
    )


def run(fails: Callable[[Traits], bool], known: list[Traits], message: str = TOO_LARGE) -> Cause:
    """Return the only cause of a run in which the cases with a property fail."""
    results = [result(n, each, message if fails(each) else "") for n, each in enumerate(known)]
    [cause] = causes_of(results)
    return cause


GRID = [traits(h, k, q) for h, k, q in product(HEADS, KEYS, (1, 2, 6)) if q <= k]


@pytest.mark.parametrize(
    ("fails", "phrase"),
    [
        (lambda t: t["heads"] % 16, "a head count that is not divisible by 16"),
        (lambda t: t["heads"] == 1, "1 head"),
        (lambda t: t["heads"] > 20, "more than 24 heads"),
        (lambda t: t["keys"][0] > 64, "a row of more than 64 keys"),
        (lambda t: t["queries"] > 1, "a row of more than 1 query token"),
        *[
            (
                lambda t, tile=tile: t["keys"][0] % tile,
                f"a row whose number of keys is not a multiple of {tile}",
            )
            for tile in (16, 64)
        ],
        (
            lambda t: t["heads"] % 16 and t["queries"] > 1,
            "a head count that is not divisible by 16, and a row of more than 1 query token",
        ),
    ],
)
def test_the_sentence_names_the_separating_property(fails: Callable[[Traits], bool], phrase: str):
    """S-20: the sentence has the number of failing tests and of passing cases."""
    failing = sum(bool(fails(each)) for each in GRID)
    assert run(fails, GRID).sentence == (
        f"S-5, out: error too large in {failing} tests; every failing case has {phrase}, "
        f"and none of the {len(GRID) - failing} passing cases does."
    )


@pytest.mark.parametrize("tile", [32, 128])
def test_tails_of_other_tiles(tile: int):
    """S-20: the cases with multiples of the tile pass, so the sentence names the tile."""
    keys = [n * tile + extra for n in (1, 2, 3) for extra in (0, 1, tile // 2)]
    known = [traits(16, k) for k in keys]
    cause = run(lambda t: t["keys"][0] % tile, known)
    phrase = f"a row whose number of keys is not a multiple of {tile}"
    assert f"every failing case has {phrase}," in cause.sentence


def test_all_types_but_one():
    """S-5: a sum in 16 bits fails in both types of 16 bits."""
    kinds = ("float32", "float16", "bfloat16")
    known = [traits(h, k, dtype=d) for h, k, d in product(HEADS, KEYS, kinds)]
    cause = run(lambda t: t["dtype"] != "float32" and t["longest"] > 1, known)
    assert "every failing case has a dtype other than float32" in cause.sentence


def test_padded_tokens_are_found():
    """S-6: a flag of a case is also a property."""
    known = [traits(h, 9, padded_tokens=n % 3 == 0) for n, h in enumerate(HEADS)]
    cause = run(lambda t: t["padded_tokens"], known)
    others = "and none of the 5 passing cases does."
    assert f"every failing case has padded tokens, {others}" in cause.sentence


def test_a_property_need_not_be_perfect():
    """S-20: a few exceptions are allowed and counted, among failing and passing cases."""
    odd = {3, 40}

    def fails(known: Traits) -> bool:
        return (known["queries"] > 1) != (GRID.index(known) in odd)

    long = [known for known in GRID if known["queries"] > 1]
    others = len(GRID) - len(long)
    wrong = sum(GRID[number] in long for number in odd)
    cause = run(fails, GRID)
    passing = others - (2 - wrong) + wrong
    assert f"{len(long) - wrong} of {len(cause.tests)} failing cases have" in cause.sentence or (
        "every failing case has" in cause.sentence
    )
    assert f"of the {passing} passing cases" in cause.sentence


def test_nothing_separates():
    """S-20: if no property separates the cases, the sentence states that."""
    cause = run(lambda t: hash((t["heads"], t["keys"][0] * 7, t["queries"])) % 2 == 0, GRID)
    assert "no property of a case that the suite knows separates them from the " in cause.sentence


def test_a_single_failure_has_no_property():
    """S-20: one case differs from all others in many properties, so none is named."""
    cause = run(lambda t: t is GRID[7], GRID)
    assert cause.sentence == (
        f"S-5, out: error too large in 1 test; {len(GRID) - 1} comparable cases passed."
    )


def test_where_everything_fails():
    """S-20: steps in which no query sees a key compare nothing and do not count as passing."""
    empty = traits(4, 0)
    cause = run(lambda t: t["keys"][0] > 0, [*GRID, empty])
    assert cause.sentence.endswith("; every case in which a query sees a key fails.")


def test_only_tests_that_compare_the_same_are_counted():
    """S-20: a test of another operation cannot have the same symptom."""
    known = [traits(h, 70) for h in HEADS]
    results = [
        result(n, each, TOO_LARGE if each["heads"] > 16 else "") for n, each in enumerate(known)
    ]
    written = replace(result(99, traits(128, 70)), checks=[], test="test_append[x]")
    [cause] = causes_of([*results, written])
    assert f"none of the {sum(h <= 16 for h in HEADS)} passing cases" in cause.sentence


def test_where_nothing_that_compares_the_same_passed():
    """S-20: tests that compare something else do not count as passing."""
    known = [traits(h, 70) for h in HEADS]
    results = [result(n, each, TOO_LARGE) for n, each in enumerate(known)]
    kept = [{"what": "bits kept", "error": 0.0, "budget": 0.0}]
    results += [replace(result(n + 50, traits(h, 70)), checks=kept) for n, h in enumerate(HEADS)]
    [cause] = causes_of(results)
    assert cause.sentence.endswith("; every case in which a query sees a key fails.")


def test_the_largest_cause_is_first_and_the_smallest_case_is_shown():
    """S-20: the cause of the most tests is first, and its smallest case is replayed."""
    results = [
        *(result(n, traits(h, 9), NAN) for n, h in enumerate(HEADS[:2])),
        *(result(n + 50, traits(h, 9), TOO_LARGE) for n, h in enumerate(HEADS[::-1])),
    ]
    large, small = causes_of(results)
    assert (len(large.tests), len(small.tests)) == (len(HEADS), 2)
    assert large.smallest.traits["heads"] == 1
    assert large.error.startswith("9 of 16 elements past their budget, first at")
    assert large.replay == f"{large.smallest.replay} --dump failed.safetensors"


@pytest.mark.parametrize(
    ("origin", "rule"),
    [
        (NanOrigin.UNREAD, "S-9"),
        (NanOrigin.SHARED_MEMORY, "S-9"),
        (NanOrigin.GUARD_ZONES, "S-9"),
        (NanOrigin.LATE_INPUTS, "S-9"),
        (NanOrigin.BUFFERS, "S-5"),
        (NanOrigin.COMPUTED, "S-5"),
        (NanOrigin.NOT_UNREAD, "S-5"),
    ],
)
def test_the_origin_of_a_nan_decides_which_rule_it_breaks(origin: NanOrigin, rule: str):
    """S-9: the rule is broken by a read of memory that the kernel must not read."""
    failed = result(3, GRID[3], NAN)
    [cause] = causes_of([failed, result(4, GRID[4])], {failed.test: origin})
    assert cause.symptom.rule == rule
    assert origin.phrase in cause.sentence


def test_nan_that_was_read_is_one_cause_in_tests_of_all_rules():
    """S-9: tests of other rules also find a NaN that was read."""
    other = "[S-8] out: 9 of 16 elements past their budget, first at (0, 0): nan, exact 2"
    failed = [result(n, GRID[n], text) for n, text in enumerate((NAN, NAN, other))]
    assert len(causes_of(failed)) == 2
    origins = dict.fromkeys(telling_tests(failed), NanOrigin.UNREAD)
    assert len(origins) == 2
    [cause] = causes_of(failed, origins)
    assert len(cause.tests) == 3


def test_strided_inputs_and_merges_do_not_show_the_origin_of_a_nan():
    """S-9: their gaps and partial results without keys hold NaN in every profile."""
    strided = result(0, traits(1, 1, strided_inputs=True), NAN)
    merged = result(1, {"operations": ["merge"]}, NAN)
    plain = result(2, GRID[-1], NAN)
    assert telling_tests([strided, merged]) == []
    assert telling_tests([strided, merged, plain]) == [plain.test]
    [cause] = causes_of([strided, plain], {plain.test: NanOrigin.UNREAD})
    assert cause.smallest == strided
    assert "memory that the step does not own was read" in cause.sentence


def test_a_nan_without_a_known_origin():
    """S-9: the sentence does not name an origin."""
    failed = result(3, GRID[3], NAN)
    [cause] = causes_of([failed])
    assert (cause.symptom.rule, cause.origin) == ("S-9", "")


@pytest.mark.parametrize(
    ("message", "symptom"),
    [
        (f"{ERROR}{TOO_LARGE}", Symptom("S-5", "out", "error too large")),
        (
            f"{ERROR}[S-8] out: 9 of 16 elements past their budget, first at (0, 0): nan, exact 2",
            Symptom("S-8", "out", "NaN"),
        ),
        (
            f"{ERROR}[S-7] lse: -inf at (0, 0), expected 3.2; every query",
            Symptom("S-7", "lse", "-inf"),
        ),
        (
            f"{ERROR}[S-5] trace prefixes, step 3, rank 0, token 5 (a): {TOO_LARGE}",
            Symptom("S-5", "out", "error too large"),
        ),
        (
            "E   IndexError: index 137 is out of bounds\nE   backend raised IndexError in attend",
            Symptom("", "attend", "exception IndexError: index N is out of bounds"),
        ),
        (
            "E   Failed: DID NOT RAISE any of (InvalidArgument, Unsupported)",
            Symptom("", "", "bad input was accepted without an error"),
        ),
        (
            f"{ERROR}[S-4] out: token 3 changed when an unseen token changed",
            Symptom("S-4", "out", "a token that a query does not see changes its output"),
        ),
        (
            f"{ERROR}[S-4] out: token 3 did not change when a visible token changed",
            Symptom("S-4", "out", "a token that a query sees does not change its output"),
        ),
        ("E   AssertionError: plan wrote 3 bytes", Symptom("", "", "plan wrote N bytes")),
        (f"{ERROR}[S-10] cache: 4 bytes wrong, first", Symptom("S-10", "cache", "wrong bytes")),
        (
            f"{ERROR}[S-6] lse: 4.789 at (0, 0), expected -inf; token 0",
            Symptom("S-6", "lse", "finite where the query sees no key"),
        ),
    ],
)
def test_what_is_wrong(message: str, symptom: Symptom):
    """S-20: failures of one bug have the same symptom, which has no numbers of single tests."""
    assert symptom_of(replace(result(0, {}, "x"), message=message)) == symptom


def test_a_process_that_ended():
    """S-20: a process that ended has no output to compare, and no dump."""
    died = replace(
        result(0, {}, "x"), end="died", message="the process was killed by SIGSEGV during this test"
    )
    late = replace(died, test="other", end="timed-out")
    found = causes_of([died, late])
    assert {cause.symptom.kind for cause in found} == {
        "the process was killed by SIGSEGV",
        "no result within the time limit",
    }
    assert not any(cause.has_dump or "--dump" in cause.replay for cause in found)


def test_every_case_has_traits():
    """S-20: every case has the same traits of plain data, with its number of heads."""
    run = Run(ReferenceBackend(), "x:y", CORE["cpu"].dims, load_profile(STRICT))
    found = [traits_of_case(run, case, "float32") for group in CASES.values() for case in group]
    assert len({tuple(each) for each in found}) == 1
    for case, each in zip((case for group in CASES.values() for case in group), found, strict=True):
        assert case.num_heads in {None, each["heads"]}
        assert each["work"] > 0
        assert all(0 <= count <= each["longest"] for count in each["seen"])


@pytest.mark.parametrize(
    "said",
    [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: Triton Error [CUDA]: misaligned address",
    ],
)
def test_errors_of_a_wild_address_are_one_cause(said: str):
    """S-9: all errors of CUDA about addresses have one symptom, and there is no dump."""
    error = f"E   {said}\nE   backend raised Error in attend"
    known = replace(result(0, GRID[0]), outcome="failed", message=error, checks=[])
    kind = "an address outside the memory of the device"
    assert symptom_of(known) == Symptom("S-9", "attend", kind)
    [cause] = causes_of([known, *_numbered(GRID[1:])])
    assert not cause.has_dump


def test_failures_of_a_rule_are_compared_with_tests_of_that_rule():
    """S-19: if passing tests check the rule, only these are compared with the failing tests."""
    invariant = [replace(r, rules=["S-19"]) for r in _numbered(GRID[::2])]
    wrong = "[S-19] out: 9 of 16 elements past their budget, first at (0, 0, 0): 1, exact 2"
    failed = [replace(r, outcome="failed", message=ERROR + wrong, checks=[]) for r in invariant[:9]]
    [cause] = causes_of([*failed, *invariant[9:], *_numbered(GRID[1::2])])
    assert f"the {len(invariant) - 9} passing cases" in cause.sentence


def _numbered(known: list[Traits]) -> list[Result]:
    return [result(n, each) for n, each in enumerate(known)]
