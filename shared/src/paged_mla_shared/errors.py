"""The two ways in which an implementation says no."""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An argument that no implementation can accept.

    Raised before anything is written or launched. The message always names the
    argument, what was given and what is allowed.

    Parameters
    ----------
    argument : str
        Field or parameter name, as the caller spells it.
    given : object
        The offending value, or what is wrong with it.
    allowed : str
        What would have been accepted.
    """

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        self.argument = argument
        super().__init__(f"{argument}: got {given}; allowed: {allowed}")


class Unsupported(Exception):
    """A legal request outside what this implementation declares.

    A backend may raise it only for something its ``Capabilities`` do not list.
    """
