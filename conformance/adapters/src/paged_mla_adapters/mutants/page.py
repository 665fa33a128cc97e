"""The section about surroundings on the page of mutants."""

from __future__ import annotations

from collections import Counter

from paged_mla_adapters.mutants.careless import MUTANTS
from paged_mla_adapters.mutants.guard import GUARDS, SHARED_MEMORY, STREAM

HEADING = "## Surroundings"
_NEED_GPU = (SHARED_MEMORY, STREAM)
_ABOUT = """
The [surroundings](../adapters/README.md#surroundings) of calls find faults that a test alone does
not find. The second part of `nox -s mutants` (`python -m paged_mla_adapters.mutants`) runs a step
of the suite twice on each of [these
kernels](../adapters/src/paged_mla_adapters/mutants/careless.py): with the guard named in this table
the step must fail with the guard's message, and without the guard it must pass. On a machine
without a GPU the command skips the kernels that need one. This command runs one kernel:

    TRITON_INTERPRET=1 paged-mla conformance --quick --profile kernel \\
        --backend paged_mla_adapters.mutants.backends:writes-before-the-cache
"""


def section() -> str:
    """Return the section, from its heading on."""
    number = Counter(mutant.guard.name for mutant in MUTANTS.values())
    on_gpu = {guard.name: number[guard.name] for guard in _NEED_GPU}
    lines = []
    for guard in GUARDS:
        many, there = number[guard.name], on_gpu.get(guard.name, 0)
        lines.append(f"| {guard.name} | {guard.finds} | {many} | {many - there} | {there} |")
    many, there = number.total(), sum(on_gpu.values())
    lines.append(f"| **all** | | **{many}** | **{many - there}** | **{there}** |")
    listed = [
        f"| `{m.name}` | {m.operation} | {m.guard.name} | {m.what} |" for m in MUTANTS.values()
    ]
    head = "| guard | what it finds | mutants | killed on a CPU | need a GPU |"
    return "\n".join(
        [
            HEADING,
            _ABOUT,
            *(head, "|---" * 5 + "|", *lines, ""),
            *("| mutant | operation | guard | what it does |", "|---" * 4 + "|", *listed, ""),
        ]
    )


def with_section(page: str) -> str:
    """Return a page in which the section replaces an older one, or is added at the end."""
    before, _, older = page.partition(HEADING)
    _, heading, behind = older.partition("\n## ")
    return f"{before.rstrip()}\n\n{section()}{heading}{behind}"
