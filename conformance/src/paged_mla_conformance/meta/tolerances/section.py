"""The section about fixed tolerances on the page about mutants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.tolerances.verdicts import Check, Verdict

TITLE = "## What fixed tolerances let pass"
_LET_PASS = (Check.BENCH, Check.BENCH_EXPRESSED, Check.KIT, Check.KIT_OUT)


def section(verdicts: Sequence[Verdict], cases: int, expressed: int) -> str:
    """Return the section as Markdown.

    Parameters
    ----------
    verdicts : sequence of Verdict
        The verdict of every mutant.
    cases, expressed : int
        How many cases run on a mutant in float32, and how many of them a definition of
        FlashInfer-Bench can express.
    """
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(MUTANTS[verdict.name].fault_class, []).append(verdict)
    lines = [_line(fault, [str(n) for n in _counts(of)]) for fault, of in groups.items()]
    total = _line("**all**", [f"**{n}**" for n in _counts(verdicts)])
    text = _TEXT.format(cases=cases, expressed=expressed, bench=_BENCH, kit=_KIT)
    return "\n".join([TITLE, "", text, _HEAD, "|" + "---|" * 8, *lines, total, ""])


def renew(page: Path, text: str) -> None:
    """Write the section at the end of a page.

    It replaces an older section and all text after that section.
    """
    before = page.read_text().partition(TITLE)[0].rstrip("\n")
    page.write_text(f"{before}\n\n{text}")


def _counts(verdicts: Sequence[Verdict]) -> list[int]:
    """Return the numbers of a line.

    They count all mutants, mutants with different outputs, and of these the mutants that the
    budgets find and the mutants that each fixed tolerance accepts.
    """
    showing = [verdict.found for verdict in verdicts if Check.BITS in verdict.found]
    found = sum(Check.BUDGETS in found for found in showing)
    passed = [sum(check not in found for found in showing) for check in _LET_PASS]
    return [len(verdicts), len(showing), found, *passed]


def _line(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


_HEAD = (
    "| fault | mutants | different output | budgets find | FlashInfer-Bench lets pass "
    "| in cases that it can express | SGLang lets pass | without the lse |"
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
Every mutant runs only attention, over a cache that the reference filled, with all steps of a case
on one runner. `out` and `lse` of the mutant are compared with the right ones three times: with the
suite's budgets, and with the tolerances of two other projects.

- FlashInfer-Bench: an element is wrong if its absolute and its relative error are both above 1e-2,
  and no element may be wrong ([source]({bench})). An infinite number is always wrong. Cases in
  which a right lse is -inf are therefore not compared with this tolerance.
- SGLang's attention kit: no error may exceed 3e-2 + 3e-2 times the right value ([source]({kit})).
  The kit compares the output of a layer and no lse; the last column does not compare the lse.

The {cases} cases are all cases of the suite that attend to the cache, except those of production
sizes, in the dims and element types named above. Definitions of FlashInfer-Bench can express
{expressed} of them ([list](flashinfer-bench.md)). The column "in cases that it can express"
counts a fault that these cases cannot show, for example a fault of trees or of rotations, as one
that passes. The table shows which faults a tolerance lets pass on the suite's cases, not what the
inputs of the other projects find. No mutant was measured at the dims of a model.

A mutant has a different output if any bit of an output differs or if it raises an error. The other
mutants write, plan, merge or accept something wrong, which these comparisons do not test and the
suite does. An output that is different and within the budgets breaks only the rules about bits
([S-17](../../reference/docs/rules.md#s-17), [S-20](../../reference/docs/rules.md#s-20)), for which
the suite has separate tests. This command writes the section again; it takes half an hour on two
cores:

    python -m paged_mla_conformance.meta.tolerances --page conformance/docs/mutants.md
"""
