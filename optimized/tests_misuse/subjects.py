"""Every public class that is misused, by the name that ``--only`` takes."""

from __future__ import annotations

import drawn_steps
import machine
import steps
from search import Subject

if not machine.ON_GPU:
    from paged_mla_optimized.backend.interpreter import leave_out_unseen_work

    leave_out_unseen_work()

SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            "step",
            drawn_steps.READS,
            drawn_steps.steps,
            steps.hold,
            drawn_steps.wrong_in,
            machine.forget,
        ),
    )
}
_DRAWS = {"Step": (steps.Step, steps.hold), "inf": (float("inf"), None), "nan": (float("nan"), None)}


def ask(text: str) -> None:
    """Hold a draw that is written as Python."""
    draw = eval(text, {"__builtins__": {}}, {name: kind for name, (kind, _) in _DRAWS.items()})  # noqa: S307
    _DRAWS[type(draw).__name__][1](draw)
