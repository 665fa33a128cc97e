"""Every public class that the search tests, by its name in ``--only``."""

from __future__ import annotations

import math
from typing import Any

import drafts
import drawn_steps
import hosts
import layers
import loads
import machine
import prefills
import ranks
import steps
from search import Subject

if not machine.ON_GPU:
    from paged_mla_optimized.triton_compat.unseen_work import leave_out_unseen_work

    leave_out_unseen_work()

_ALL: dict[type, Subject] = {
    steps.Step: Subject(
        "step",
        drawn_steps.READS,
        drawn_steps.steps,
        steps.hold,
        drawn_steps.wrong_in,
        machine.forget,
    ),
    drafts.Draft: Subject(
        "drafts", drafts.READS, drafts.drafts, drafts.hold_draft, drafts.wrong_in_draft
    ),
    drafts.Window: Subject(
        "window",
        drafts.READS_OF_WINDOW,
        drafts.windows,
        drafts.hold_window,
        drafts.wrong_in_window,
    ),
    drafts.Merge: Subject(
        "merge", drafts.READS_OF_MERGE, drafts.merges, drafts.hold_merge, drafts.wrong_in_merge
    ),
    prefills.Prompt: Subject(
        "prefill",
        prefills.READS,
        prefills.prompts,
        prefills.hold,
        prefills.wrong_in,
        prefills.forget,
    ),
    layers.Layer: Subject(
        "layer",
        layers.READS,
        layers.layers,
        layers.hold,
        lambda layer: drawn_steps.wrong_in(layer.step),
        layers.forget,
        layers.launches,
    ),
    ranks.Rank: Subject(
        "rank",
        ranks.READS,
        ranks.ranks,
        ranks.hold,
        lambda rank: drawn_steps.wrong_in(rank.step),
        ranks.forget,
        ranks.launches,
    ),
    loads.Load: Subject("load", loads.READS, loads.loads, loads.hold, drawn_steps.wrong_in),
    hosts.Misfit: Subject(
        "host", hosts.READS, hosts.misfits, hosts.hold, hosts.wrong_in, hosts.forget, examples=20
    ),
}
SUBJECTS = {subject.name: subject for subject in _ALL.values()}


def ask(text: str) -> None:
    """Check a draw that is a Python expression."""
    names: dict[str, Any] = {kind.__name__: kind for kind in _ALL}
    draw = eval(text, names | {"inf": math.inf, "nan": math.nan})
    _ALL[type(draw)].hold(draw)
