"""Allow one forward at a time over a pool, because forwards share its plan and its buffers."""

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

_CALL = nn.Module._wrapped_call_impl.__code__  # the code that runs every call of a module


@dataclass(frozen=True)
class _Turn:
    """A forward: its thread, the call of a module that it runs in, and its rows.

    The fields contain the ``id`` of objects, so that they keep no object alive.
    """

    thread: int
    name: str
    frame: int
    called: int
    """The id of the module or the code: a new frame may have the id of a frame that has ended."""
    rows: int


class Turns:
    """The forward that currently uses a pool.

    A forward starts with its first layer. It ends with the attention of its last layer, or when the
    call of the model returns or raises. There is no callback for the latter, so this class inspects
    the stack of the forward's thread when another forward starts before the last layer has run.

    Parameters
    ----------
    model : Module
    names : sequence of str
        The names of the attention modules in `model`.
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
        """Reserve the pool for the caller's forward if no other forward uses it.

        Raises
        ------
        InvalidArgument
            Another forward uses it, in another thread or around this forward. The reservation is
            unchanged then.
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
        """Return whether the forward that uses the pool runs over these rows."""
        with self._lock:
            return self._turn is not None and self._turn.rows == id(rows)

    def end(self) -> None:
        """Release the pool after the last attention of its forward."""
        with self._lock:
            self._turn = None

    def check_idle(self, rows: object) -> None:
        """Check that no forward over these rows is running, before a change or a copy of them.

        Raises
        ------
        InvalidArgument
            A forward over these rows is running.
        """
        with self._lock:
            turn = self._turn
            if turn is not None and turn.rows == id(rows) and _is_under_way(turn):
                given = f"a cache that is changed or copied while {_words(turn)}"
                raise InvalidArgument("cache", given, "changes and copies between forwards")

    def _call_around_layers(self) -> FrameType:
        """Return the innermost call of a module that contains all layers.

        Without such a call, return the outermost call of a module, or else the caller's frame.
        """
        found = sys._getframe(2)
        for frame in _with_callers(found):
            if frame.f_code is _CALL:
                found = frame
                if frame.f_locals["self"] in self._around_all:
                    break
        return found


def _is_under_way(turn: _Turn) -> bool:
    """Return whether the call of a forward is still on the stack of its thread."""
    top = sys._current_frames().get(turn.thread)
    return any(
        id(frame) == turn.frame and _called(frame) == turn.called for frame in _with_callers(top)
    )


def _called(frame: FrameType) -> int:
    """Return the id of the module that a frame calls, or else of the code that it runs."""
    return id(frame.f_locals["self"] if frame.f_code is _CALL else frame.f_code)


def _with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _words(turn: _Turn) -> str:
    return f"a forward in thread {turn.name!r} is running"
