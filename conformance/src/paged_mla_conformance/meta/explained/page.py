"""The results, as lines and as a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One explained dump.

    Parameters
    ----------
    name, test : str
        Of a mutant, and of the test whose step it is; or what the fault is, and "".
    rule : str
        The first broken rule; "" if none was found.
    rules : tuple of str
        Those that it breaks.
    best : str
        The hypothesis that explains all of it; "" if none does.
    place : int
        Of the mutant's own name among the hypotheses, from 1; 0 if it is not there.
    alike : int
        Hypotheses, it among them, that explain the dump equally well, as well as any.
    known : bool
        Whether the fault is in the catalogue that is tried.
    dumps : int
        That were explained together: further ones as long as several faults, or none, fit.
    shared_place : int
        Of the mutant's own name among the faults that explain them, from 1; 0 without.
    shared_best : str
        The fault that explains them all; "" if none does.
    shared_alike : int
        Faults that explain them all equally well.
    why : str
        Why there is no dump; "" if there is.
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
        """Whether the first broken rule is one that it breaks."""
        return self.rule in self.rules

    @property
    def line(self) -> str:
        """What is printed of it."""
        if self.why:
            return f"-     {self.name}: {self.why}"
        mark = "right" if self.is_right else "WRONG"
        place = f", place {self.place or '-'}, {self.alike} alike" if self.known else ""
        if self.dumps > 1:
            place += f", of {self.dumps} dumps {self.shared_place or '-'}"
        return f"{mark} {self.name}: {self.rule or 'nothing broken'}{place}; {self.best or '-'}"


@dataclass
class Results:
    """All of a run."""

    mutants: list[Case] = field(default_factory=list)
    single: list[Case] = field(default_factory=list)
    healthy: int = 0
    accused: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return the totals, a line each."""
        return "\n".join(f"{what}: {value}" for what, value in self.totals().items())

    def totals(self) -> dict[str, str]:
        """Return what is counted."""
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
            "fault named first of one dump, or beside others that predict the same": _share(
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
        """Return the page."""
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
                "## First broken rule is none of the mutant's", "",
                "| mutant | test | found | breaks |", "|---|---|---|---|", *wrong, "",
                "## Faults that are not named first", "",
                _ALIKE, "",
                _LATER, "|---" * 9 + "|", *later, "",
                "## Single faults", "",
                "| fault | rule | explained as |", "|---|---|---|", *single, "",
            ]
        )  # fmt: skip


_ALIKE = """\
*Alike*: so many explain this dump equally well, the fault among them. As long as not one
fault alone fits, a step of another test is explained together with it, up to three: the right
half of the table."""
_LATER = (
    "| mutant | test | place | alike | named first | dumps | place | alike | named first together |"
)


def _share(some: int, of: int) -> str:
    return f"{some} of {of}, {some / of:.1%}" if of else "-"


_HEAD = """\
# How often an explanation is right

`nox -s explained` writes this page to `out/explained.md`.

Each mutant gives one dump: the step at which it fails the first test that kills it, as the table
of the quick verdict has it. Memory that no step may read holds other tokens where the mutant fails
on them too, and NaN where it does not. In large caches, the blocks that wrapped offsets reach are
among the listed ones. Half of the numbers of out and lse, chosen at random, are moved by one unit
in the last place, so that their bits identify nothing. Where several faults explain a dump
equally well, the first is the one that breaks the fewest of some small cases of this suite
([ordinary.py](../../reference/src/paged_mla_reference/explain/hypotheses/ordinary.py)), which has
no access to the right one. Single faults are random and in no catalogue. Right steps are drawn from
all cases, in all types and cache formats.
"""
