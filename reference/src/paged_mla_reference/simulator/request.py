"""What a client asks for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Request:
    """One request, with the answer the model will give it.

    Parameters
    ----------
    id : str
    prompt : tuple of int
        Token ids, at least one.
    output : tuple of int
        Tokens the model will say, at least one: a function of the request, so they are known
        from the start and revealed as the engine samples them.
    arrival : int
        Engine step before which the engine does not know the request.
    extra_keys : tuple of str
        What changes the model's answer besides tokens, an adapter or a salt (S-13).
    abort : int, optional
        Engine step at which the client hangs up.
    """

    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    arrival: int = 0
    extra_keys: tuple[str, ...] = ()
    abort: int | None = None

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output
