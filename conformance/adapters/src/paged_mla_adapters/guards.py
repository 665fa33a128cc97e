"""Tensors inside larger allocations, whose other bytes are checked.

A kernel that writes outside a tensor, or between its lines, changes a byte that
:meth:`Guards.check` checks and reports. A kernel that reads there reads the filling. If the filling
is NaN, its outputs become NaN. A second run with another filling gives different outputs.

Only tensors that calls may not write need a second copy. All other checked bytes have one known
value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paged_mla_reference.tolerance.compare import Mismatch

_ALIGNMENT = 256  # bytes; CUDA aligns its allocations to this too


class Overwritten(Mismatch):
    """A call changed a byte that it may not change (S-10)."""


@dataclass
class _Room:
    """An allocation that contains one tensor."""

    name: str
    memory: torch.Tensor  # uint8 [margin + offset + tensor + margin]
    first: int
    end: int
    gaps: torch.Tensor | None  # bool [end - first]: bytes between elements; None without such bytes
    is_written: bool
    filling: int
    kept: torch.Tensor | None = None  # uint8 [end - first]: a copy, if the tensor is only read

    @property
    def inside(self) -> torch.Tensor:
        return self.memory[self.first : self.end]

    def fill(self, byte: int) -> None:
        """Fill the bytes outside all elements, and keep a copy of a tensor that is only read."""
        self.filling = byte
        self.memory[: self.first].fill_(byte)
        self.memory[self.end :].fill_(byte)
        if self.gaps is not None:
            self.inside.masked_fill_(self.gaps, byte)
        if not self.is_written:
            self.kept = self.inside.clone()

    def changes(self) -> list[tuple[str, int, torch.Tensor]]:
        """Return the description, first byte and mask of changed bytes of each checked part."""
        before, behind = self.memory[: self.first], self.memory[self.end :]
        found = [
            (f"written before {self.name}", 0, before != self.filling),
            (f"written behind {self.name}", self.end, behind != self.filling),
        ]
        if self.kept is not None:
            found.append(("", self.first, self.inside != self.kept))
        elif self.gaps is not None:
            changed = (self.inside != self.filling) & self.gaps
            found.append((f"written between the lines of {self.name}", self.first, changed))
        return found

    def describe(self, what: str, start: int, changed: torch.Tensor) -> str:
        """Return a sentence with the number of changed bytes and the first of them."""
        at = int(changed.to(torch.uint8).argmax())
        count = int(changed.sum())
        many = f"{count} byte{'' if count == 1 else 's'}"
        was = self.filling if what or self.kept is None else int(self.kept[at])
        said = f"{many} {what}" if what else f"the input {self.name} was changed in {many}"
        now = int(self.memory[start + at])
        return f"{said}, first at byte {start + at - self.first}: {was} became {now}"


class Guards:
    """Allocates tensors and checks the bytes around them and the tensors that are only read.

    Parameters
    ----------
    device : str or torch.device
    margin : int
        The number of bytes before and after each tensor, a multiple of 256. With 0 a tensor fills
        its allocation, for tools that check allocations themselves.
    filling : int
        The value of all bytes outside elements, until a call of :meth:`fill`. 0xFF makes every
        floating-point number NaN and every signed integer -1.

    Raises
    ------
    ValueError
        The margin is negative or not a multiple of 256.
    """

    def __init__(self, device: str | torch.device, *, margin: int = 1024, filling: int = 0) -> None:
        if margin < 0 or margin % _ALIGNMENT:
            raise ValueError(f"margin: got {margin}; allowed: 0 and multiples of {_ALIGNMENT}")
        self._device, self._margin, self._filling = torch.device(device), margin, filling
        self._rooms: list[_Room] = []

    def place(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        stride: tuple[int, ...] | None = None,
        offset: int = 0,
        written: bool = False,
    ) -> torch.Tensor:
        """Return a copy of a tensor in an allocation of its own.

        Parameters
        ----------
        name : str
            The name of the tensor in errors of :meth:`check`.
        tensor : Tensor
        stride : tuple of int or None
            The strides of the copy in elements, without 0; ``None`` makes the copy contiguous.
        offset : int
            The distance in bytes from a 256-byte boundary, a multiple of the element's size.
        written : bool
            Whether calls may change the elements.

        Raises
        ------
        ValueError
            A stride of 0 would put several elements in one place.
        """
        shape, size = tuple(tensor.shape), tensor.dtype.itemsize
        stride = torch.empty(shape, device="meta").stride() if stride is None else stride
        if any(n > 1 and step == 0 for n, step in zip(shape, stride, strict=True)):
            raise ValueError(f"stride: got {stride}; allowed: strides other than 0")
        reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
        nbytes = reach * size if tensor.numel() else 0
        room = self._room(name, nbytes, offset=offset, written=written)
        if nbytes > tensor.numel() * size:
            steps = (*(step * size for step in stride), 1)
            room.gaps = torch.ones(nbytes, dtype=torch.bool, device=self._device)
            room.gaps.as_strided((*shape, size), steps).fill_(value=False)
        placed = _view(room, tensor.dtype, shape, stride)
        if tensor.numel():
            placed.copy_(tensor)
        room.fill(self._filling)
        return placed

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous, uninitialized tensor that calls may change.

        Parameters
        ----------
        name : str
            The name of the tensor in errors of :meth:`check`.
        shape : tuple of int
        dtype : torch.dtype
        """
        room = self._room(name, math.prod(shape) * dtype.itemsize, offset=0, written=True)
        room.fill(self._filling)
        return _view(room, dtype, shape, torch.empty(shape, device="meta").stride())

    def forget(self, name: str) -> None:
        """Stop checking the tensors with this name and release the references to their memory."""
        self._rooms = [room for room in self._rooms if room.name != name]

    def _room(self, name: str, nbytes: int, *, offset: int, written: bool) -> _Room:
        first = self._margin + offset
        total = first + nbytes + self._margin
        memory = torch.empty(total, dtype=torch.uint8, device=self._device)
        room = _Room(name, memory, first, first + nbytes, None, written, self._filling)
        self._rooms.append(room)
        return room

    def fill(self, byte: int) -> None:
        """Fill the bytes outside elements with `byte`; later checks expect the present contents."""
        for room in self._rooms:
            room.fill(byte)

    def check(self, call: str = "a call") -> None:
        """Compare all checked bytes with their values after the last placement or filling.

        This waits for the device once, for all tensors together.

        Parameters
        ----------
        call : str
            The name of the call before this check, for the message.

        Raises
        ------
        Overwritten
            A byte changed. The message has the tensor's name and the position of the byte, counted
            from the tensor's first byte.
        """
        found = [(room, room.changes()) for room in self._rooms]
        marks = [changed.any() for _, changes in found for *_, changed in changes]
        if not marks or not bool(torch.stack(marks).any()):
            return
        said = [
            room.describe(what, start, changed)
            for room, changes in found
            for what, start, changed in changes
            if bool(changed.any())
        ]
        raise Overwritten("S-10", call, "; ".join(said))


def _view(
    room: _Room, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return the tensor in an allocation; the storage of the tensor is the whole allocation."""
    placed = torch.empty(0, dtype=dtype, device=room.memory.device)
    return placed.set_(room.memory.untyped_storage(), room.first // dtype.itemsize, shape, stride)
