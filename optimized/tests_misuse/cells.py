"""The table of draws: launches, the values that they read, and how the values are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

KINDS = ("negative", "zero", "too large", "not monotone", "inconsistent")

Cell = tuple[str, str, str]  # launch, value, kind


class Cells:
    """Counts draws.

    Parameters
    ----------
    reads : mapping
        For each launch, the values that it reads, and the kinds of errors that each can have.
    """

    def __init__(self, reads: Mapping[str, Mapping[str, Iterable[str]]]) -> None:
        self._counts: Counter[Cell] = Counter()
        for launch, values in reads.items():
            for value, kinds in values.items():
                self._counts.update({(launch, value, kind): 0 for kind in kinds})

    def count(self, launches: Iterable[str], wrong: Iterable[tuple[str, str]]) -> None:
        """Count one draw, by its launches and by its pairs of value and kind."""
        wrong = set(wrong)
        for launch in launches:
            for value, kind in wrong:
                if (launch, value, kind) in self._counts:
                    self._counts[launch, value, kind] += 1

    def rare(self, least: int) -> list[Cell]:
        """Return the cells that were drawn fewer than `least` times."""
        return [cell for cell, count in self._counts.items() if count < least]

    def of(self, value: str, kind: str) -> int:
        """Return how often the rarest cell of a value and kind was drawn."""
        return min(
            (count for cell, count in self._counts.items() if cell[1:] == (value, kind)),
            default=0,
        )

    def __str__(self) -> str:
        rows = sorted({cell[:2] for cell in self._counts})
        width = max((len(f"{launch}  {value}") for launch, value in rows), default=0)
        lines = [" " * width + "".join(f"{kind:>14}" for kind in KINDS)]
        for launch, value in rows:
            counts = [self._counts.get((launch, value, kind), "-") for kind in KINDS]
            lines.append(f"{launch}  {value}".ljust(width) + "".join(f"{n!s:>14}" for n in counts))
        return "\n".join(lines)
