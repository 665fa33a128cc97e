"""Surroundings of a kernel's calls, in which faults that depend on memory or streams show.

Tensors are between guard zones, uninitialized memory is full of NaN, and on a GPU the inputs of a
call are written late, on a stream that no other work uses.
"""
