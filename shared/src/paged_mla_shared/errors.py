"""The ways in which an implementation says no."""

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
        self.argument, self.given, self.allowed = argument, given, allowed
        super().__init__(f"{argument}: got {given}; allowed: {allowed}")

    def inside(self, place: str) -> InvalidArgument:
        """Return the same error with the file or the line in front that the argument is from."""
        argument = f"{place}: {self.argument}" if self.argument else place
        return InvalidArgument(argument, self.given, self.allowed)


class Unsupported(Exception):
    """A legal request outside what this implementation declares.

    A backend may raise it only for something its ``Capabilities`` do not list.
    """


class OutOfMemory(Exception):
    """A legal request for which the device has too little memory at this time.

    It is no answer, right or wrong: a test that ends with it was not run.
    """
