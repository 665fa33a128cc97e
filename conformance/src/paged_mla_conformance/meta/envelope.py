"""The largest sizes of the suite's cases in each group, and the sizes in production.

``python -m paged_mla_conformance.meta.envelope --page conformance/docs/envelope.md`` writes the
table. A bug that only appears above a size is only found by a case above that size, so no group may
be smaller than the steps that engines run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.scenarios import CORE
from paged_mla_shared.cases import CASES, MERGES, Case, MergeCase
from paged_mla_shared.cases import PRODUCTION as OF_CASES
from paged_mla_shared.dims import SMALL
from paged_mla_shared.folders import make_folders
from paged_mla_shared.problem import Mask

Envelope = dict[str, float]

MEANINGS = {
    "keys": "tokens of the longest row",
    "queries": "query tokens of one row after a context",
    "tokens": "query tokens of a step",
    "padding": "padded tokens at the end of a step",
    "rows": "rows of a step",
    "tree": "draft nodes of a row",
    "row blocks": "blocks of a row",
    "block ids": "blocks of the cache",
    "heads": "most heads",
    "pairs": "query tokens times heads of a step",
    "steps": "steps on one runner",
    "least scale": "smallest softmax scale",
    "most scale": "largest softmax scale",
    "theta": "largest base of a rotation",
    "magnitude": "largest difference of YaRN's two mscales",
    "partials": "partial results in one merge",
}

PRODUCTION: dict[str, Mapping[str, float]] = {
    **OF_CASES,
    "trace": {"keys": 1300, "queries": 600, "rows": 30},
}


def envelopes() -> dict[str, Envelope]:
    """Return the envelope of every group: the largest value of each size, by the size's name."""
    found = {group: of_cases(cases) for group, cases in CASES.items()}
    return found | {"merge": of_merges(MERGES), "trace": of_scenarios(CORE)}


def of_cases(cases: Iterable[Case]) -> Envelope:
    """Return the largest size of each kind, and the smallest scale, for a model with 4 heads."""
    envelope: Envelope = {"least scale": float("inf")}
    for case in cases:
        problem = case.problem(SMALL, "float32")
        heads = problem.dims.num_heads
        rope, yarn = case.rope, case.rope and case.rope.yarn
        steps = [[row for row in step if row.seq_len] for step in case.steps]
        rows = [row for step in steps for row in step]
        behind = [row.query_len for row in rows if row.context_len]
        tokens = max(sum(row.query_len for row in step) for step in steps)
        _raise(
            envelope,
            {
                "keys": max((row.seq_len for row in rows), default=0),
                "queries": max(behind, default=0),
                "tokens": tokens,
                "padding": case.padded_tokens,
                "rows": max(map(len, case.steps)),
                "tree": problem.max_draft_tokens if case.mask is Mask.TREE else 0,
                "row blocks": max((-(-r.seq_len // case.block_size) for r in rows), default=0),
                "block ids": problem.num_blocks,
                "heads": heads,
                "pairs": tokens * heads,
                "steps": len(case.steps),
                "most scale": problem.softmax_scale,
                "theta": rope.theta if rope else 0,
                "magnitude": abs(yarn.mscale - yarn.mscale_all_dim) if yarn else 0,
            },
        )
        envelope["least scale"] = min(envelope["least scale"], problem.softmax_scale)
    return envelope


def of_merges(cases: Iterable[MergeCase]) -> Envelope:
    """Return the largest values of all sizes in some merges."""
    envelope: Envelope = {}
    for case in cases:
        sizes = {"tokens": case.tokens, "heads": case.num_heads, "partials": len(case.parts)}
        _raise(envelope, {**sizes, "pairs": case.tokens * case.num_heads})
    return envelope


def of_scenarios(scenarios: Iterable[Scenario]) -> Envelope:
    """Return the largest values of all sizes in some schedules."""
    envelope: Envelope = {}
    for scenario in scenarios:
        config, requests = scenario.config, scenario.requests
        longest = max(len(request.tokens) for request in requests)
        prompt = max(len(request.prompt) for request in requests)
        _raise(
            envelope,
            {
                "keys": longest,
                "queries": min(config.max_chunk, config.token_budget, prompt),
                "tokens": config.max_step_tokens,
                "rows": min(config.max_step_rows, len(requests)),
                "row blocks": -(-longest // config.block_size),
                "block ids": config.num_blocks,
            },
        )
    return envelope


def shortfalls(group: str, envelope: Envelope) -> list[str]:
    """Return a phrase for each size in which the cases of a group are below production."""
    found = []
    for what, needed in PRODUCTION[group].items():
        have = envelope.get(what, 0)
        if have > needed if what.startswith("least") else have < needed:
            found.append(f"{group}: {what} {have:g}, production has {needed:g}")
    return found


def page() -> str:
    """Return the table as Markdown."""
    found = envelopes()
    lines = [
        "# The envelope of the suite's cases",
        "",
        "This page lists the largest sizes of the suite's cases. A cell is the largest value of a",
        "size, or the smallest scale, in all cases of a group, for a model with 4 heads.",
        "Production needs the bold sizes, and a test checks them. This command writes the page:",
        "",
        "    python -m paged_mla_conformance.meta.envelope --page conformance/docs/envelope.md",
        "",
        "| group | " + " | ".join(MEANINGS) + " |",
        "|---" * (len(MEANINGS) + 1) + "|",
    ]
    for group, envelope in found.items():
        cells = []
        for what in MEANINGS:
            value = envelope.get(what, 0)
            text = f"{value:g}" if isinstance(value, float) else str(value)
            cells.append(f"**{text}**" if what in PRODUCTION[group] else text if value else "")
        lines.append(f"| {group} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- **{what}**: {meaning}" for what, meaning in MEANINGS.items())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the page; return 0 if no group is below production, else 1."""
    parser = argparse.ArgumentParser(
        prog="paged_mla_conformance.meta.envelope", description=__doc__
    )
    parser.add_argument("--page", type=Path, metavar="MARKDOWN")
    options = parser.parse_args(arguments)
    if options.page:
        make_folders(options.page)
        options.page.write_text(page())
    found = [phrase for group, e in envelopes().items() for phrase in shortfalls(group, e)]
    print("\n".join(found) or "no group is below production")
    return 1 if found else 0


def _raise(envelope: Envelope, values: Envelope) -> None:
    for what, value in values.items():
        envelope[what] = max(envelope.get(what, 0), value)


if __name__ == "__main__":
    sys.exit(main())
