"""The search reaches production sizes, reports them, and makes failing cases small."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from paged_mla_conformance.meta.mutants.backends import mutant
from paged_mla_conformance.search.command import main
from paged_mla_conformance.search.corpus import load_case
from paged_mla_conformance.search.production import WAYS, production_case
from paged_mla_conformance.search.shrink import shrunk
from paged_mla_conformance.search.sizes import Size, sizes_of
from paged_mla_conformance.search.sweep import Sweep
from paged_mla_reference.backend import create
from paged_mla_shared.cases import Row
from paged_mla_shared.dims import SMALL

REFERENCE = "paged_mla_reference.backend:create"
NUMBERED_ONLY = ["--skip-corpus", "--schedules", "0", "--cases", "0", "--examples", "0"]


def test_a_number_is_a_case():
    """S-19: the same number gives the same case; another number gives another case."""
    assert production_case(7) == production_case(7)
    assert production_case(7) != production_case(7 + len(WAYS))


def test_sixty_cases_reach_every_size_class():
    """S-19: 60 numbered cases contain every size class."""
    reached = Counter(size for number in range(60) for size in sizes_of(production_case(number)))
    assert [size for size in Size if not reached[size]] == []


def test_small_cases_reach_none():
    """A case of two short rows is in no size class."""
    small = replace(
        production_case(0), rows=(Row(70, 1), Row(9, 2)), then=(), num_heads=4, rope=None,
        softmax_scale=None, cache_blocks=0, explicit_slots=False, padded_tokens=0,
    )  # fmt: skip
    assert sizes_of(small) == set()


@pytest.mark.parametrize("number", range(len(WAYS)))
def test_the_reference_passes_a_case_of_each_way(number: int):
    """S-19: the reference passes a case that is large in each way."""
    sweep = Sweep()
    sweep.run_case(create(), SMALL, ("float32",), number)
    assert sweep.failures == {}
    assert sweep.cases == 1


def test_a_failure_is_made_smaller_and_replayed(tmp_path: Path):
    """S-4: the smaller case is written to a replay file, which fails again."""
    wrong = "a-query-does-not-see-itself"
    sweep = Sweep()
    sweep.run_case(mutant(wrong), SMALL, ("float32",), 1, tmp_path)
    [message] = sweep.failures.values()
    path = tmp_path / "failing-production-1.json"
    assert str(path) in message
    case, dtype = load_case(path)
    assert repr(case) in message
    assert (dtype, len(case.steps), len(case.rows) <= 2) == ("float32", 1, True)
    backend = f"paged_mla_conformance.meta.mutants.backends:{wrong}"
    assert main(["--backend", backend, "--replay", str(path)]) == 1
    assert main(["--backend", REFERENCE, "--replay", str(path)]) == 0


def test_shrinking_ends_where_nothing_smaller_fails():
    """A failure that needs a long row keeps a long row."""
    small = shrunk(production_case(1), lambda case: any(row.seq_len > 60 for row in case.rows))
    assert [row.seq_len > 60 for row in small.rows] == [True]
    assert sum(row.seq_len for row in small.rows) <= 130


def test_the_command_prints_the_size_classes(capsys: pytest.CaptureFixture[str]):
    """S-19: it prints the count of each class, and how many classes were not reached."""
    assert main(["--backend", REFERENCE, *NUMBERED_ONLY, "--production", "2"]) == 0
    printed = capsys.readouterr().out
    assert "a row of more than 4096 keys" in printed
    assert "2 cases of production sizes" in printed
    assert f"of {len(Size)} size classes not reached" in printed


def test_a_search_of_some_minutes_ends(capsys: pytest.CaptureFixture[str]):
    """S-19: the search runs rounds until the time is over."""
    timed = ["--skip-corpus", "--minutes", "0.02", "--workers", "1"]
    assert main(["--backend", REFERENCE, *timed]) == 0
    printed = capsys.readouterr().out
    assert "5 cases of production sizes" in printed
    assert "6 schedules" in printed
    assert "0 failures" in printed


@pytest.mark.parametrize(
    "options",
    [["--minutes", "1", "--cases", "5"], ["--workers", "2"], ["--minutes", "0"]],
    ids=["cases", "workers", "no-minute"],
)
def test_options_without_effect_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]):
    """An option that would be ignored is an error."""
    assert main(["--backend", REFERENCE, *options]) == 2
    assert options[-2] in capsys.readouterr().err
