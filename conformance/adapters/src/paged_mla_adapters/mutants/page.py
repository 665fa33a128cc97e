"""The part of the page of mutants that is about surroundings."""

from __future__ import annotations

from collections import Counter

from paged_mla_adapters.mutants.careless import MUTANTS
from paged_mla_adapters.mutants.guard import GUARDS, SHARED_MEMORY, STREAM

HEADING = "## Surroundings"
_NEED_GPU = (SHARED_MEMORY, STREAM)
_ABOUT = """
Kernels that pass by luck alone are found by [what lies around their
calls](../adapters/README.md#surroundings). The second part of `nox -s mutants` puts each of [these
kernels](../adapters/src/paged_mla_adapters/mutants/careless.py) to a step of the suite, twice: the
step must fail by a message of the guard that is named here, and pass without that guard. What needs
a GPU is named where there is none, and asked there by the same command. To see one fail:

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
    """Return a page with the section in the place of an older one, or else at its end."""
    before, _, older = page.partition(HEADING)
    _, heading, behind = older.partition("\n## ")
    return f"{before.rstrip()}\n\n{section()}{heading}{behind}"
