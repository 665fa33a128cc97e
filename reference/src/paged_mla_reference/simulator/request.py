"""What a client asks for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paged_mla_shared.errors import InvalidArgument

LATEST_STEP = 1 << 16  # of an arrival: an engine without work runs through every step before it
MOST_LETTERS = 1 << 12  # of extra keys: they are part of the key of each block


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
        What changes the model's answer besides tokens, an adapter or a salt (S-13); at most 4096
        letters in all, and as many keys.
    abort : int, optional
        Engine step at which the client hangs up, not before its arrival.
    """

    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    arrival: int = 0
    extra_keys: tuple[str, ...] = ()
    abort: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no client can ask for.

        Raises
        ------
        InvalidArgument
        """
        for name in ("prompt", "output"):
            tokens = getattr(self, name)
            if not tokens or min(tokens) < 0:
                given = f"{min(tokens)}" if tokens else "no token"
                raise InvalidArgument(name, given, "one token or more, each >= 0")
        size = max(len(self.extra_keys), sum(map(len, self.extra_keys)))
        if size > MOST_LETTERS:
            given = f"{len(self.extra_keys)} keys, {sum(map(len, self.extra_keys))} letters"
            raise InvalidArgument("extra_keys", given, f"at most {MOST_LETTERS} of each")
        if not 0 <= self.arrival <= LATEST_STEP:
            raise InvalidArgument("arrival", self.arrival, f"steps 0 to {LATEST_STEP}")
        if self.abort is not None and not self.arrival <= self.abort <= LATEST_STEP:
            allowed = f"steps {self.arrival}, the arrival, to {LATEST_STEP}"
            raise InvalidArgument("abort", self.abort, allowed)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output."""
        return self.prompt + self.output
