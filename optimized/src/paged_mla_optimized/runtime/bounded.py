"""A dict of bounded size, for results that are stored to save host time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict that drops all its keys before it would exceed `most` keys.

    It is used for lookups at every launch, where a plain dict is fastest. An order of last use
    would cost more than computing all values again, which is rarely necessary.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
