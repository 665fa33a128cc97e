"""Harsh surroundings of every call of a kernel: what a careless kernel gets wrong shows.

Tensors lie between guard zones, uninitialised memory is full of NaN, and on a GPU the inputs of a
call are written late, on a stream that no other work uses.
"""
