"""One forward at a time over a pool: all of them share its plan, its workspace and its blocks."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import FrameType

from torch import nn

from paged_mla_shared.errors import InvalidArgument

_CALL = nn.Module._wrapped_call_impl.__code__  # what runs every call of a module


@dataclass(frozen=True)
class _Turn:
    """A forward: its thread, the call of a module that it is in, and the rows it is about.

    Objects are told apart by number, so that none is kept alive.
    """

    thread: int
    name: str
    frame: int
    called: int
    """The module, or the code: a later frame may have the number of one that has ended."""
    rows: int


class Turns:
    """Which forward a pool is in.

    A forward begins with its first layer, and ends with the attention of its last one or when the
    call of the model returns or raises. Nothing tells of the latter, so the stack of its thread is
    looked at, and only where another forward finds that one has not ended.

    Parameters
    ----------
    model : Module
    names : sequence of str
        Of its attention modules in `model`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        parts = zip(*(name.split(".") for name in names), strict=False)
        shared = [same[0] for same in takewhile(lambda alike: len({*alike}) == 1, parts)]
        self._around_all = weakref.WeakSet(
            model.get_submodule(".".join(shared[:length])) for length in range(len(shared) + 1)
        )
        self._lock = threading.Lock()
        self._turn: _Turn | None = None

    def take(self, rows: object) -> None:
        """Let the forward of the caller have the pool, if no other one is under way.

        Raises
        ------
        InvalidArgument
            One is, in another thread or around this one; nothing has changed then.
        """
        me = threading.current_thread()
        frame = self._call_around_layers()
        mine = _Turn(threading.get_ident(), me.name, id(frame), _called(frame), id(rows))
        with self._lock:
            turn = self._turn
            is_mine = turn is not None and (turn.thread, turn.frame) == (mine.thread, mine.frame)
            if turn is not None and not is_mine and _is_under_way(turn):
                given = f"a forward in thread {me.name!r} while {_words(turn)}"
                allowed = "one forward at a time over a LatentPool"
                raise InvalidArgument("cache", given, allowed)
            self._turn = mine

    def is_of(self, rows: object) -> bool:
        """Return whether the forward that has the pool is about these rows."""
        with self._lock:
            return self._turn is not None and self._turn.rows == id(rows)

    def end(self) -> None:
        """Let the pool be free, behind the last attention of the forward that has it."""
        with self._lock:
            self._turn = None

    def check_idle(self, rows: object) -> None:
        """Check that no forward over these rows is under way, before they are changed or copied.

        Raises
        ------
        InvalidArgument
            One is.
        """
        with self._lock:
            turn = self._turn
            if turn is not None and turn.rows == id(rows) and _is_under_way(turn):
                given = f"a cache that is changed or copied while {_words(turn)}"
                raise InvalidArgument("cache", given, "its forward has ended")

    def _call_around_layers(self) -> FrameType:
        """Return the innermost call of a module with all layers in it, or of what there is."""
        found = sys._getframe(2)
        for frame in _with_callers(found):
            if frame.f_code is _CALL:
                found = frame
                if frame.f_locals["self"] in self._around_all:
                    break
        return found


def _is_under_way(turn: _Turn) -> bool:
    """Return whether a forward is on the stack of its thread."""
    top = sys._current_frames().get(turn.thread)
    return any(
        id(frame) == turn.frame and _called(frame) == turn.called for frame in _with_callers(top)
    )


def _called(frame: FrameType) -> int:
    """Return the number of the module that a frame calls, or of the code that it runs."""
    return id(frame.f_locals["self"] if frame.f_code is _CALL else frame.f_code)


def _with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _words(turn: _Turn) -> str:
    return f"one in thread {turn.name!r} is under way"
