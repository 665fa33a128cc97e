"""What the threads of one role wait at for each other."""

from triton.experimental.gluon import language as gl

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6
