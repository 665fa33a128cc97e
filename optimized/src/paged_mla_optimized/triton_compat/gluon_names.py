"""Gluon functions whose names differ between the supported versions of Triton."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_BUFFER = gl.shared_memory_descriptor
_COPY = "async_copy_global_to_shared"

# Triton 3.6 has the second name, later versions have the first.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""The barrier at which the threads of one role wait for each other."""

# Triton 3.6 and 3.7 have the second name, 3.9 only the first.
copy_elements = getattr(async_copy, "async_load", None) or getattr(async_copy, _COPY)
"""Start a copy of elements from global to shared memory."""
copy_box = getattr(tma, "async_load", None) or getattr(tma, _COPY)
"""Start a copy of a box of a tensor to shared memory."""

# Triton 3.9 has the first name, earlier versions have the second.
read_as = getattr(_BUFFER, "reinterpret", None) or _BUFFER._reinterpret
"""Return a view of a buffer with another type, shape and layout."""
