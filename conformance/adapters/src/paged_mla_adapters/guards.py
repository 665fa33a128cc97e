"""Tensors inside larger allocations, whose other bytes are watched.

A kernel that writes beside a tensor, or between its lines, changes a watched byte, and
:meth:`Guards.check` says where. A kernel that reads there is found by a second run over another
filling: its answers differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ALIGNMENT = 256  # of the first byte of a tensor inside its allocation, as CUDA allocates


class Overwritten(AssertionError):
    """A byte changed that no call may change."""


@dataclass
class _Room:
    """One allocation, and the tensor in it."""

    name: str
    memory: torch.Tensor  # uint8 [margin + offset + tensor + margin]
    owned: torch.Tensor  # bool, likewise: bytes of the tensor's elements
    first: int
    is_written: bool
    kept: torch.Tensor

    def keep(self) -> None:
        self.kept = self.memory.clone()

    def check(self) -> None:
        changed = self.memory != self.kept
        if self.is_written:
            changed &= ~self.owned
        if not bool(changed.any()):
            return
        at = int(changed.to(torch.uint8).argmax())
        given = f"{int(self.kept[at])} and then {int(self.memory[at])}"
        more = int(changed.sum()) - 1
        raise Overwritten(
            f"{self.name}: byte {at - self.first}, {self._place(at)}, was {given}; "
            f"{more} more bytes changed"
        )

    def _place(self, at: int) -> str:
        """Return where a byte of the allocation lies, in words."""
        if bool(self.owned[at]):
            return "of a tensor that is only read"
        if at < self.first:
            return "in front of the tensor"
        return "between its lines" if bool(self.owned[at:].any()) else "behind the tensor"


class Guards:
    """Allocates tensors, watches every byte around them, and those that are only read.

    Parameters
    ----------
    device : str or torch.device
    margin : int
        Bytes on both sides of each tensor, a multiple of 256. 0 puts tensors at both ends of their
        allocations, for tools that watch allocations themselves.
    """

    def __init__(self, device: str | torch.device, *, margin: int = 1024) -> None:
        if margin < 0 or margin % _ALIGNMENT:
            raise ValueError(f"margin: got {margin}; allowed: multiples of {_ALIGNMENT}, and 0")
        self._device, self._margin = torch.device(device), margin
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
        first = self._margin + offset
        total = first + (reach * size if tensor.numel() else 0) + self._margin
        memory = torch.zeros(total, dtype=torch.uint8, device=self._device)
        owned = torch.zeros(total, dtype=torch.bool, device=self._device)
        placed = torch.empty(0, dtype=tensor.dtype, device=self._device)
        placed.set_(memory.untyped_storage(), first // size, shape, stride)
        if tensor.numel():
            placed.copy_(tensor)
            steps = (*(step * size for step in stride), 1)
            owned.as_strided((*shape, size), steps, first).fill_(value=True)
        room = _Room(name, memory, owned, first, written, memory)
        room.keep()
        self._rooms.append(room)
        return placed

    def fill(self, byte: int) -> None:
        """Fill what is no element of a tensor with a byte, and watch contents as they are now."""
        for room in self._rooms:
            room.memory.masked_fill_(~room.owned, byte)
            room.keep()

    def check(self) -> None:
        """Hold all that is watched against what it was when it was placed or filled last.

        Raises
        ------
        Overwritten
            Names the tensor, and the changed byte counted from the tensor's first one.
        """
        for room in self._rooms:
            room.check()
