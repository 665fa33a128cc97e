"""The origins of a NaN in an output and of a wild address."""

from __future__ import annotations

from enum import Enum


class NanOrigin(Enum):
    """The origin of a NaN or of a wild address; the value is a phrase for reports."""

    UNREAD = (
        "memory that the step does not own was read, because finite numbers in that memory remove "
        "the error"
    )
    SHARED_MEMORY = (
        "the kernel read shared memory that it had not written, because zeros in shared memory "
        "remove the error"
    )
    BUFFERS = (
        "the call did not write every element of a buffer, because a buffer of zeros removes the "
        "error"
    )
    GUARD_ZONES = (
        "the kernel read memory outside its tensors, because zeros in that memory remove the error"
    )
    LATE_INPUTS = (
        "the kernel read an input before the current stream had written it, because zeros in the "
        "input remove the error"
    )
    COMPUTED = (
        "the kernel computed the NaN, because it stays when the memory that the kernel must not "
        "read holds finite numbers"
    )
    NOT_UNREAD = (
        "the NaN was computed, or was left in a buffer that the call should write, because it "
        "stays when unread memory holds finite numbers"
    )

    @property
    def phrase(self) -> str:
        """The phrase about the origin for reports."""
        return self.value

    @property
    def is_read(self) -> bool:
        """Whether the kernel read memory that it must not read (S-9)."""
        return self in {
            NanOrigin.UNREAD,
            NanOrigin.SHARED_MEMORY,
            NanOrigin.GUARD_ZONES,
            NanOrigin.LATE_INPUTS,
        }
