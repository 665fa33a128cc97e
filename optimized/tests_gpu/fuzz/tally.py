"""How many draws reached what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from asking import Outcome
from combinations import Combination


class Tally:
    """Counts of draws, each a step that was right.

    Parameters
    ----------
    wanted : iterable of Combination
        What the table has a line for, reached or not.
    """

    def __init__(self, wanted: Iterable[Combination]) -> None:
        self.wanted = list(wanted)
        self.steps: Counter[Combination] = Counter()
        self.labels: dict[str, Counter[str]] = {}
        self.failures: list[Outcome] = []
        self.configurations = 0
        self.out_of_memory = 0
        self.seconds = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count a draw's steps."""
        self.steps.update(outcome.reached)
        for subject, value in outcome.labels.items():
            self.labels.setdefault(subject, Counter())[value] += len(outcome.reached)
        self.configurations += 1
        self.out_of_memory += outcome.out_of_memory
        self.seconds += outcome.seconds
        if outcome.failure:
            self.failures.append(outcome)

    def short(self, least: int) -> list[Combination]:
        """Return the combinations that fewer than `least` draws reached."""
        return [c for c in self.wanted if self.steps[c] < least]

    def table(self) -> str:
        """Return draws by family, format and mode, then by each other subject."""
        known = {*self.wanted, *self.steps}
        modes = sorted({c.mode for c in known})
        lines = [f"{'family':<17}{'format':<17}" + "".join(f"{mode:>19}" for mode in modes)]
        for family, stored in sorted({(c.family, c.cache_format) for c in known}):
            cells = (Combination(family, stored, mode) for mode in modes)
            shown = (str(self.steps[c]) if c in known else "-" for c in cells)
            lines.append(f"{family:<17}{stored:<17}" + "".join(f"{cell:>19}" for cell in shown))
        for subject, counts in self.labels.items():
            found = sorted(counts.items(), key=_in_order)
            told = ", ".join(f"{value}: {count}" for value, count in found)
            lines.append(f"{subject} ({len(found)}): {told}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return one line with the number of draws and of failures."""
        steps = self.steps.total()
        each = self.seconds / steps if steps else 0.0
        told = [f"{steps} draws of {self.configurations} configurations"]
        told.append(f"{each:.2f} s of one process each, {len(self.failures)} failures")
        if self.out_of_memory:
            told.append(f"{self.out_of_memory} configurations given up for want of memory")
        return ", ".join(told)


def _in_order(item: tuple[str, int]) -> tuple[int, str]:
    value = item[0]
    return (int(value), "") if value.isdigit() else (0, value)
