"""Options of the project's commands that say no before anything happens."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from paged_mla_shared.documents import one_line
from paged_mla_shared.errors import InvalidArgument


def whole(least: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number, at least `least`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number < 2**63:
            raise argparse.ArgumentTypeError(f"got {text[:30]!r}; allowed: integers >= {least}")
        return number

    return parse


def one_of(allowed: Collection[str]) -> Callable[[str], str]:
    """Return an argparse type: one of these words."""

    def parse(text: str) -> str:
        if text not in allowed:
            names = ", ".join(allowed)
            raise argparse.ArgumentTypeError(f"got {text[:30]!r}; allowed: {names}")
        return text

    return parse


class OneLineParser(argparse.ArgumentParser):
    """A parser that refuses a wrong command line in one line; ``--help`` shows the usage."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and end the process with status 2."""
        self.exit(2, f"{self.prog}: {one_line(message)}\n")


def refuse_idle(options: argparse.Namespace, names: Iterable[str], needs: str) -> None:
    """Refuse options that would have no effect.

    Parameters
    ----------
    options : argparse.Namespace
    names : iterable of str
        Their names in `options`, where they are ``None`` or ``False`` unless given.
    needs : str
        What they are allowed with.

    Raises
    ------
    InvalidArgument
        One of them is given.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            option = "--" + name.replace("_", "-")
            raise InvalidArgument(option, value, f"only with {needs}, here it has no effect")
