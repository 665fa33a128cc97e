"""Tensors inside larger allocations, whose other bytes are watched.

A kernel that writes beside a tensor, or between its lines, changes a watched byte, and
:meth:`Guards.check` says where. A kernel that reads there is found by what lies there, NaN, or by a
second run over another filling: its answers differ.

Nothing is kept twice but tensors that are only read: all other watched bytes have one known value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from paged_mla_reference.tolerance.compare import Mismatch

_ALIGNMENT = 256  # of the first byte of a tensor inside its allocation, as CUDA allocates


class Overwritten(Mismatch):
    """A byte changed that no call may change (S-10)."""


@dataclass
class _Room:
    """One allocation, and the tensor in it."""

    name: str
    memory: torch.Tensor  # uint8 [margin + offset + tensor + margin]
    first: int
    end: int
    gaps: torch.Tensor | None  # bool [end - first]: bytes of no element; None where there are none
    is_written: bool
    filling: int
    kept: torch.Tensor | None = None  # uint8 [end - first], of a tensor that is only read

    @property
    def inside(self) -> torch.Tensor:
        return self.memory[self.first : self.end]

    def fill(self, byte: int) -> None:
        """Fill what is no element, and watch the rest as it is now."""
        self.filling = byte
        self.memory[: self.first].fill_(byte)
        self.memory[self.end :].fill_(byte)
        if self.gaps is not None:
            self.inside.masked_fill_(self.gaps, byte)
        if not self.is_written:
            self.kept = self.inside.clone()

    def changes(self) -> list[tuple[str, int, torch.Tensor]]:
        """Return what each watched part is called, where it begins, and which bytes changed."""
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
        """Say how many bytes changed, and which is the first."""
        at = int(changed.to(torch.uint8).argmax())
        count = int(changed.sum())
        many = f"{count} byte{'' if count == 1 else 's'}"
        was = self.filling if what or self.kept is None else int(self.kept[at])
        said = f"{many} {what}" if what else f"the input {self.name} was changed in {many}"
        now = int(self.memory[start + at])
        return f"{said}, first at byte {start + at - self.first}: {was} became {now}"


class Guards:
    """Allocates tensors, watches every byte around them, and those that are only read.

    Parameters
    ----------
    device : str or torch.device
    margin : int
        Bytes on both sides of each tensor, a multiple of 256. 0 puts tensors at both ends of their
        allocations, for tools that watch allocations themselves.
    filling : int
        The byte that lies in everything which is no element of a tensor, until :meth:`fill` is
        called. 0xFF is NaN in every type of floating point, and -1.
    """

    def __init__(self, device: str | torch.device, *, margin: int = 1024, filling: int = 0) -> None:
        if margin < 0 or margin % _ALIGNMENT:
            raise ValueError(f"margin: got {margin}; allowed: multiples of {_ALIGNMENT}, and 0")
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
            What :meth:`check` calls it.
        tensor : Tensor
        stride : tuple of int or None
            In elements, none of them 0; ``None`` packs the copy densely.
        offset : int
            Bytes from an address on 256 bytes, a multiple of the element's size.
        written : bool
            Whether calls may change its elements.

        Raises
        ------
        ValueError
            Elements would lie on each other because of a stride of 0.
        """
        shape, size = tuple(tensor.shape), tensor.dtype.itemsize
        stride = torch.empty(shape, device="meta").stride() if stride is None else stride
        if any(n > 1 and step == 0 for n, step in zip(shape, stride, strict=True)):
            raise ValueError(f"stride: got {stride}; allowed: a place for each element")
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
        """Return a dense tensor that calls may change, with whatever lies in it.

        Parameters
        ----------
        name : str
            What :meth:`check` calls it.
        shape : tuple of int
        dtype : torch.dtype
        """
        room = self._room(name, math.prod(shape) * dtype.itemsize, offset=0, written=True)
        room.fill(self._filling)
        return _view(room, dtype, shape, torch.empty(shape, device="meta").stride())

    def forget(self, name: str) -> None:
        """Stop watching a tensor, and release this reference to its memory."""
        self._rooms = [room for room in self._rooms if room.name != name]

    def _room(self, name: str, nbytes: int, *, offset: int, written: bool) -> _Room:
        first = self._margin + offset
        total = first + nbytes + self._margin
        memory = torch.empty(total, dtype=torch.uint8, device=self._device)
        room = _Room(name, memory, first, first + nbytes, None, written, self._filling)
        self._rooms.append(room)
        return room

    def fill(self, byte: int) -> None:
        """Fill what is no element of a tensor with a byte, and watch contents as they are now."""
        for room in self._rooms:
            room.fill(byte)

    def check(self, call: str = "a call") -> None:
        """Hold all that is watched against what it was when it was placed or filled last.

        The device is waited for once, however many tensors there are.

        Parameters
        ----------
        call : str
            What came before, for the message.

        Raises
        ------
        Overwritten
            Names the tensor, and the changed byte counted from the tensor's first one.
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
    """Return the tensor in a room; it has the whole allocation as its storage."""
    placed = torch.empty(0, dtype=dtype, device=room.memory.device)
    return placed.set_(room.memory.untyped_storage(), room.first // dtype.itemsize, shape, stride)
