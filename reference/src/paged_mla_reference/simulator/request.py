"""A request of a client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from paged_mla_shared.errors import InvalidArgument

LATEST_STEP = 1 << 16  # limit of arrivals and aborts: an engine without work runs every idle step
MOST_LETTERS = 1 << 12  # limit of extra keys, which are part of the key of each block


@dataclass(frozen=True)
class Request:
    """One request, with the tokens that the model will generate for it.

    Parameters
    ----------
    id : str
    prompt : tuple of int
        Token ids >= 0, at least one.
    output : tuple of int
        Token ids >= 0 that the model will generate, at least one. They depend only on the request,
        so they are known from the start. The engine samples them one after the other.
    arrival : int
        Engine step at which the request arrives, 0 to 2^16.
    extra_keys : tuple of str
        Inputs other than tokens that change the model's output, such as an adapter or a salt
        (S-13); at most 4096 keys with at most 4096 characters in all.
    abort : int, optional
        Engine step at which the client aborts the request, `arrival` to 2^16.
    """

    id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    arrival: int = 0
    extra_keys: tuple[str, ...] = ()
    abort: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises
        ------
        InvalidArgument
            A value is not in its range.
        """
        for name in ("prompt", "output"):
            tokens = getattr(self, name)
            if not tokens or min(tokens) < 0:
                given = f"{min(tokens)}" if tokens else "no token"
                raise InvalidArgument(name, given, "at least one token, and tokens >= 0")
        size = max(len(self.extra_keys), sum(map(len, self.extra_keys)))
        if size > MOST_LETTERS:
            given = f"{len(self.extra_keys)} keys, {sum(map(len, self.extra_keys))} characters"
            raise InvalidArgument(
                "extra_keys", given, f"at most {MOST_LETTERS} keys and as many characters"
            )
        if not 0 <= self.arrival <= LATEST_STEP:
            raise InvalidArgument("arrival", self.arrival, f"steps 0 to {LATEST_STEP}")
        if self.abort is not None and not self.arrival <= self.abort <= LATEST_STEP:
            allowed = f"steps {self.arrival} (the arrival) to {LATEST_STEP}"
            raise InvalidArgument("abort", self.abort, allowed)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the prompt and the output."""
        return self.prompt + self.output
