"""What is remembered to spare host time, without growing for ever."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict that forgets all it holds before it would hold more than `most` keys.

    What is looked up at every launch is best kept in a plain dict: an order of last use would
    cost more than finding everything once more, which hardly any process ever has to.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
