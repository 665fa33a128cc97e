"""Fixed tolerances: the checks, the cases that run on a mutant, and the section of the page."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.mutants.backends import FLOAT32
from paged_mla_conformance.meta.tolerances import __main__, asked
from paged_mla_conformance.meta.tolerances.checks import (
    judges_bench,
    passes_bench,
    passes_kit,
    passes_kit_out,
)
from paged_mla_conformance.meta.tolerances.section import TITLE, renew, section
from paged_mla_conformance.meta.tolerances.verdicts import Check, Verdict, verdict
from paged_mla_conformance.suite.selection.benchmark import ATTENDED, expressed
from paged_mla_shared.problem import Output

PAGE = Path(__file__).parent.parent / "docs" / "mutants.md"
RIGHT = Output(np.float32([[[0.0, 2.0]]]), np.float32([[3.0]]))
NAMES = {case.id: case for cases in ATTENDED.values() for case in cases}


def answer(out: list[float], lse: float = 3.0) -> Output:
    """Return an output of one query token and one head."""
    return Output(np.float32([[out]]), np.float32([[lse]]))


@pytest.mark.parametrize(
    ("actual", "passes"),
    [
        (RIGHT, (True, True, True)),
        (answer([0.009, 2.019]), (True, True, True)),  # one error of each is small
        (answer([0.011, 2.0]), (False, True, True)),
        (answer([0.0, 2.021]), (False, True, True)),
        (answer([0.031, 2.0]), (False, False, False)),
        (answer([0.0, 2.0], 3.022), (True, True, True)),
        (answer([0.0, 2.0], 3.1), (False, True, True)),
        (answer([0.0, 2.0], 3.2), (False, False, True)),
        (answer([0.0, 2.0], -np.inf), (False, False, True)),
        (answer([0.0, np.nan]), (False, False, False)),
        (Output(RIGHT.out.astype(np.float16), RIGHT.lse), (False, False, False)),
    ],
)
def test_outputs_that_a_check_accepts(actual: Output, passes: tuple[bool, bool, bool]):
    """The checks are those of FlashInfer-Bench, of SGLang's kit, and of the kit without an lse."""
    found = (passes_bench(actual, RIGHT), passes_kit(actual, RIGHT), passes_kit_out(actual, RIGHT))
    assert found == passes


def test_flashinfer_bench_refuses_a_right_lse_of_minus_infinity():
    """S-6: its check refuses every infinite lse."""
    nothing = answer([0.0, 0.0], -np.inf)
    assert not judges_bench(nothing)
    assert not passes_bench(nothing, nothing)
    assert passes_kit(nothing, nothing)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("decode-h16", []),
        ("extend-shared-prefix", []),
        ("decode-h40", ["num_heads 40"]),
        ("extend-bs16", ["block_size 16"]),
        ("formats-260-rows", ["caches of 8 bits"]),
    ],
)
def test_cases_that_a_definition_can_express(name: str, missing: list[str]):
    assert expressed(NAMES[name])[1] == missing


def test_cases_take_heads_and_pages_that_definitions_have():
    adapted, missing = expressed(NAMES["decode-bs17"])
    assert (adapted.num_heads, adapted.block_size, missing) == (16, 1, [])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the cases to a few."""
    names = ("decode-h16", "decode-h3", "extend-fresh-q17", "empty-padded-tokens")
    params_of_group = asked.params_of_group
    monkeypatch.setattr(
        asked,
        "params_of_group",
        lambda *given: [param for param in params_of_group(*given) if param.case.id in names],
    )
    asked.asked.cache_clear()
    yield
    asked.asked.cache_clear()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "unnoticed"),
    [
        ("right", set(Check)),
        ("lse-in-base-2", {Check.KIT_OUT}),
        ("hash-ignores-the-parent", set(Check)),  # of the engine
        ("context-is-added-twice", set(Check)),  # of the plan
    ],
)
def test_checks_that_find_a_mutant(name: str, unnoticed: set[Check]):
    """S-7: a check without an lse does not find an lse in another base."""
    found = verdict(name).found
    assert set(Check) - set(found) == unnoticed
    assert all(case.endswith("-fp32") for case in found.values())


@pytest.mark.usefixtures("few")
def test_the_cases_of_a_mutant():
    """FlashInfer-Bench cannot express a row without keys."""
    found = {case.trial.case.id: case for case in asked.asked(FLOAT32)}
    assert set(found) == {"decode-h16", "decode-h3", "extend-fresh-q17", "empty-padded-tokens"}
    assert found["decode-h16"].expressed
    assert not found["empty-padded-tokens"].expressed


def test_the_section_counts_accepted_mutants(tmp_path: Path):
    names = ["lse-in-base-2", "hash-ignores-the-parent"]
    noticed = {Check.BITS: "a", Check.BUDGETS: "a", Check.KIT: "a"}
    text = section([Verdict(names[0], noticed), Verdict(names[1])], 395, 100)
    assert "| lse base and scale | 1 | 1 | 1 | 1 | 1 | 0 | 1 |\n" in text
    assert "| **all** | **2** | **1** | **1** | **1** | **1** | **0** | **1** |\n" in text
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{TITLE}\n\nold\n")
    renew(page, text)
    assert page.read_text() == f"# Page\n\n{text}"


def test_the_committed_section_counts_every_mutant():
    _, title, text = PAGE.read_text().partition(TITLE)
    assert title
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    groups = [[int(cell) for cell in cells] for _, *cells in lines[1:-1]]
    total = [int(re.sub(r"\D", "", cell)) for cell in lines[-1][1:]]
    assert [sum(column) for column in zip(*groups, strict=True)] == total
    assert total[0] == len(MUTANTS)
    assert total[2] <= total[1] <= total[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-mutant"], "these mutants do not exist: ['no-such-mutant']"),
        (["lse-in-base-2", "--page", "mutants.md"], "--page needs every mutant"),
        (["--page", "no/such.md"], "--page: got no/such.md; allowed: an existing file"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], said: str, capsys):
    with pytest.raises(SystemExit):
        __main__.main(arguments)
    assert said in capsys.readouterr().err
