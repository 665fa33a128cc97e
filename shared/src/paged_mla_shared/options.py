"""Options of the project's commands, which report wrong values before any work starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from typing import NoReturn

from paged_mla_shared.documents import one_line
from paged_mla_shared.errors import InvalidArgument


def whole(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers from `least` to 2^63 - 1."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number < 2**63:
            raise argparse.ArgumentTypeError(
                f"got {text[:30]!r}; allowed: integers >= {least} and < 2^63"
            )
        return number

    return parse


def one_of(allowed: Collection[str]) -> Callable[[str], str]:
    """Return an argparse type for the words in `allowed`."""

    def parse(text: str) -> str:
        if text not in allowed:
            names = ", ".join(allowed)
            raise argparse.ArgumentTypeError(f"got {text[:30]!r}; allowed: {names}")
        return text

    return parse


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a wrong command line in one line, without the usage."""

    status = 2
    """The exit status for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with :attr:`status`."""
        self.exit(self.status, f"{self.prog}: {one_line(message)}\n")


def refuse_idle(options: argparse.Namespace, names: Iterable[str], needs: str) -> None:
    """Check that options that would have no effect are not set.

    Parameters
    ----------
    options : argparse.Namespace
    names : iterable of str
        The names in `options` of options that are ``None`` or ``False`` unless they are set.
    needs : str
        The option or the argument with which they have an effect.

    Raises
    ------
    InvalidArgument
        One of the options is set.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value is not False:
            option = "--" + name.replace("_", "-")
            raise InvalidArgument(option, value, f"only with {needs}; otherwise it has no effect")
