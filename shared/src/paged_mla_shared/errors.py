"""The exceptions that are raised for invalid or unsupported requests."""

from __future__ import annotations


class InvalidArgument(ValueError):
    """An argument that no implementation can accept.

    It is raised before anything is written or launched. The message always names the
    argument, its value, and the allowed values.

    Parameters
    ----------
    argument : str
        The name of the field or parameter, as the caller writes it.
    given : object
        The wrong value, or a description of it.
    allowed : str
        The values that are allowed.
    """

    def __init__(self, argument: str, given: object, allowed: str) -> None:
        self.argument, self.given, self.allowed = argument, given, allowed
        super().__init__(f"{argument}: got {given}; allowed: {allowed}")

    def inside(self, place: str) -> InvalidArgument:
        """Return the same error with `place`, a file or a line, in front of the argument."""
        argument = f"{place}: {self.argument}" if self.argument else place
        return InvalidArgument(argument, self.given, self.allowed)


class Unsupported(Exception):
    """A legal request that the implementation does not declare.

    A backend may raise it only for a request that its ``Capabilities`` do not include.
    """


class OutOfMemory(Exception):
    """A legal request for which the device has too little free memory.

    A test that ends with this exception is skipped; it neither passes nor fails.
    """
