"""The results of explained dumps, as lines and as a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One explained dump.

    Parameters
    ----------
    name, test : str
        The names of a mutant and of the test whose step the dump contains; or the description of a
        single fault, and "".
    rule : str
        The first broken rule that the explanation found; "" if it found none.
    rules : tuple of str
        The rules that the fault breaks.
    best : str
        The hypothesis that explains the whole dump; "" if none does.
    place : int
        The place of the mutant among the hypotheses, from 1; 0 if it is not among them.
    alike : int
        How many hypotheses explain the dump best, if the mutant is one of them; else 0.
    known : bool
        Whether the fault is in the catalogue of the explanation.
    dumps : int
        How many dumps were explained together; more than one if not exactly one fault fits.
    shared_place : int
        The place of the mutant among the faults that explain all dumps, from 1; 0 if not there.
    shared_best : str
        The fault that explains all dumps; "" if none does.
    shared_alike : int
        How many faults explain all dumps equally well.
    why : str
        Why there is no dump; "" if there is one.
    seconds : float
        Processor time of the explanation.
    """

    name: str
    test: str
    rule: str = ""
    rules: tuple[str, ...] = ()
    best: str = ""
    place: int = 0
    alike: int = 0
    known: bool = False
    dumps: int = 1
    shared_place: int = 0
    shared_best: str = ""
    shared_alike: int = 0
    why: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the first broken rule is a rule that the fault breaks."""
        return self.rule in self.rules

    @property
    def line(self) -> str:
        """The printed line of the case."""
        if self.why:
            return f"-     {self.name}: {self.why}"
        mark = "right" if self.is_right else "WRONG"
        place = f", place {self.place or '-'}, {self.alike} alike" if self.known else ""
        if self.dumps > 1:
            place += f", of {self.dumps} dumps {self.shared_place or '-'}"
        return f"{mark} {self.name}: {self.rule or 'nothing broken'}{place}; {self.best or '-'}"


@dataclass
class Results:
    """All results of a run."""

    mutants: list[Case] = field(default_factory=list)
    single: list[Case] = field(default_factory=list)
    healthy: int = 0
    accused: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return the totals, one per line."""
        return "\n".join(f"{what}: {value}" for what, value in self.totals().items())

    def totals(self) -> dict[str, str]:
        """Return the totals by their descriptions."""
        dumped = [case for case in self.mutants if not case.why]
        known = [case for case in dumped if case.known]
        explained = [case for case in self.single if case.best]
        return {
            "mutants with a dump": f"{len(dumped)} of {len(self.mutants)}",
            "first broken rule right": _share(sum(c.is_right for c in dumped), len(dumped)),
            "fault named first, of one dump": _share(sum(c.place == 1 for c in known), len(known)),
            "fault named first, of up to three dumps": _share(
                sum(c.shared_place == 1 for c in known), len(known)
            ),
            "fault named first of one dump, or tied with others that predict the same": _share(
                sum(c.place == 1 or c.alike > 0 for c in known), len(known)
            ),
            "single faults, first broken rule right": _share(
                sum(c.is_right for c in self.single), len(self.single)
            ),
            "single faults explained": _share(len(explained), len(self.single)),
            "right steps called broken": f"{len(self.accused)} of {self.healthy}",
            "processor seconds of an explanation, the longest": (
                f"{max((c.seconds for c in [*dumped, *self.single]), default=0.0):.1f}"
            ),
        }

    def markdown(self) -> str:
        """Return the page as Markdown."""
        totals = [f"| {what} | {value} |" for what, value in self.totals().items()]
        missing = Counter(case.why for case in self.mutants if case.why)
        without = [
            f"| {why} | {count} | {', '.join(c.name for c in self.mutants if c.why == why)} |"
            for why, count in missing.items()
        ]
        wrong = [
            f"| `{c.name}` | {c.test} | {c.rule or 'nothing broken'} | {', '.join(c.rules)} |"
            for c in self.mutants
            if not c.why and not c.is_right
        ]
        later = [
            f"| `{c.name}` | {c.test} | {c.place or '-'} | {c.alike or '-'} | `{c.best or '-'}` "
            f"| {c.dumps} | {c.shared_place or '-'} | {c.shared_alike or '-'} "
            f"| `{c.shared_best or '-'}` |"
            for c in self.mutants
            if c.known and not c.why and (c.place != 1 or c.shared_place != 1)
        ]
        single = [f"| {c.name} | {c.rule} | {c.best or 'nothing fits'} |" for c in self.single]
        return "\n".join(
            [
                _HEAD,
                "| | |", "|---|---|", *totals, "",
                "## Mutants without a dump", "",
                "| why | mutants | names |", "|---|---|---|", *without, "",
                "## The first broken rule is not a rule of the mutant", "",
                "| mutant | test | found | breaks |", "|---|---|---|---|", *wrong, "",
                "## Faults that are not named first", "",
                _ALIKE, "",
                _LATER, "|---" * 9 + "|", *later, "",
                "## Single faults", "",
                "| fault | rule | explained as |", "|---|---|---|", *single, "",
            ]
        )  # fmt: skip


_ALIKE = """\
*Alike* is the number of faults, including the right one, that explain the dump equally well. While
not exactly one fault fits, a step of another test is explained together with it, up to three steps:
the right half of the table."""
_LATER = (
    "| mutant | test | place | alike | named first | dumps | place | alike | named first together |"
)


def _share(some: int, of: int) -> str:
    return f"{some} of {of}, {some / of:.1%}" if of else "-"


_HEAD = """\
# How often an explanation is right

This page shows how often `paged-mla explain` names the right fault. `nox -s explained` writes it to
`out/explained.md`.

Each mutant gives one dump: the step at which it fails the first test that kills it in the table of
the quick verdict.

- Memory that no step may read holds other tokens if the mutant also fails on them, and NaN
  otherwise. In large caches, the listed blocks include those that overflowed offsets reach.
- Half of the numbers of `out` and `lse`, chosen at random, are changed by one unit in the last
  place, so that their bits do not identify the fault.
- If several faults explain a dump equally well, the first is the fault that breaks the fewest of
  some [small cases](../../reference/src/paged_mla_reference/explain/hypotheses/ordinary.py).
- Single faults are random and not in the catalogue.
- Right steps are drawn from all cases except large ones, in all types and cache formats.
"""
