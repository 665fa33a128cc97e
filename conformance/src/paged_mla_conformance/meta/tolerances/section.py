"""The section of the mutants' page that says what fixed tolerances let pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.tolerances.verdicts import Check, Verdict

TITLE = "## What fixed tolerances let pass"
_LET_PASS = (Check.BENCH, Check.BENCH_EXPRESSED, Check.KIT, Check.KIT_OUT)


def section(verdicts: Sequence[Verdict], cases: int, expressed: int) -> str:
    """Return the section.

    Parameters
    ----------
    verdicts : sequence of Verdict
        Of every mutant.
    cases, expressed : int
        How many cases a mutant in float32 is asked, and how many of them a definition of
        FlashInfer-Bench can ask.
    """
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(MUTANTS[verdict.name].fault_class, []).append(verdict)
    lines = [_line(fault, [str(n) for n in _counts(of)]) for fault, of in groups.items()]
    total = _line("**all**", [f"**{n}**" for n in _counts(verdicts)])
    text = _TEXT.format(cases=cases, expressed=expressed, bench=_BENCH, kit=_KIT)
    return "\n".join([TITLE, "", text, _HEAD, "|" + "---|" * 8, *lines, total, ""])


def renew(page: Path, text: str) -> None:
    """Write the section as a page's last one, in place of the one that it has."""
    before = page.read_text().partition(TITLE)[0].rstrip("\n")
    page.write_text(f"{before}\n\n{text}")


def _counts(verdicts: Sequence[Verdict]) -> list[int]:
    """Return the numbers of a line: mutants, those that show, found ones, and those let pass."""
    showing = [verdict.found for verdict in verdicts if Check.BITS in verdict.found]
    found = sum(Check.BUDGETS in found for found in showing)
    passed = [sum(check not in found for found in showing) for check in _LET_PASS]
    return [len(verdicts), len(showing), found, *passed]


def _line(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


_HEAD = (
    "| fault | mutants | answer otherwise | budgets find | FlashInfer-Bench lets pass "
    "| in cases that it can ask | SGLang lets pass | without the lse |"
)
_BENCH = (
    "https://github.com/flashinfer-ai/flashinfer-bench/blob/40e6ca7844b514eb4b1c7edba6d6a7377df57870"
    "/flashinfer_bench/bench/utils.py"
)
_KIT = (
    "https://github.com/sgl-project/sglang/blob/0049d63aa27667e306fba7a8f33f4fea30948dfe"
    "/python/sglang/test/kits/attention_unittest/attention_methods/mla_attention.py"
)
_TEXT = """\
Every mutant is asked for attention alone, over a cache that the reference filled, step after step
of a case on one runner. Its `out` and `lse` are compared with the right ones three times: by the
suite's budgets, and by the tolerances of two other projects.

- FlashInfer-Bench: an element is wrong if its absolute and its relative error are both past 1e-2,
  and no element may be wrong ([source]({bench})). An infinite number is always wrong, so that cases
  in which a right lse is -inf are not asked.
- SGLang's attention kit: no error is past 3e-2 + 3e-2 times the right value ([source]({kit})). The
  kit compares the output of a layer and no lse; the last column leaves the lse out.

The {cases} cases are those of the suite that attend to the cache, but for those of production's
size, in the dims and element types named above. Definitions of FlashInfer-Bench can ask {expressed}
of them ([which](flashinfer-bench.md)); what these cannot show, such as a fault of trees or of
rotations, is let pass in that column. So the columns say what a tolerance lets pass of the suite's
own cases. They do not say what the projects' own inputs find, and nothing here was measured
in bfloat16 but the mutants that break S-22, and nothing at the dims of a model.

A mutant answers otherwise if any bit of an answer differs, or if it raises. What the others do
wrong is in what they write, plan, merge or accept, which none of these comparisons asks and the
suite does. An answer that is otherwise and within the budgets is wrong by its bits alone
(S-17, S-20), for which the suite has tests of their own. To write this section anew, in half an
hour of two cores:

    python -m paged_mla_conformance.meta.tolerances --page conformance/docs/mutants.md
"""
