"""Where the NaN of an output, or a wild address, can come from."""

from __future__ import annotations

from enum import Enum


class NanOrigin(Enum):
    """Where a NaN or a wild address comes from; the value is a phrase for reports."""

    UNREAD = "memory that the step does not own was read, as finite numbers there remove the error"
    SHARED_MEMORY = (
        "the kernel read shared memory that it had not written, as zeros there remove the error"
    )
    BUFFERS = (
        "the call did not write every element of a buffer, as a buffer of zeros removes the error"
    )
    GUARD_ZONES = "the kernel read memory outside its tensors, as zeros there remove the error"
    LATE_INPUTS = (
        "the kernel read an input before the current stream had written it, as zeros there remove "
        "the error"
    )
    COMPUTED = (
        "the kernel computed the NaN, as it stays where the memory that the kernel must not read "
        "holds finite numbers"
    )
    NOT_UNREAD = (
        "the NaN was computed, or was left in a buffer that the call should write, as it stays "
        "where unread memory holds finite numbers"
    )

    @property
    def phrase(self) -> str:
        """The origin in words."""
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
