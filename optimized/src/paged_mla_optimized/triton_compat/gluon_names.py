"""What Gluon calls otherwise in some of the versions of Triton that this runs with."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_BUFFER = gl.shared_memory_descriptor
_COPY = "async_copy_global_to_shared"

# Triton 3.6 has the second, later ones the first.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""What the threads of one role wait at for each other."""

# Triton 3.6 and 3.7 have the second, 3.9 the first alone.
copy_elements = getattr(async_copy, "async_load", None) or getattr(async_copy, _COPY)
"""Begin to copy elements from global to shared memory."""
copy_box = getattr(tma, "async_load", None) or getattr(tma, _COPY)
"""Begin to copy a box of a tensor to shared memory."""

# Triton 3.9 has the first, earlier ones the second.
read_as = getattr(_BUFFER, "reinterpret", None) or _BUFFER._reinterpret
"""Return a buffer as one of another type, shape and layout."""
