"""Harsh surroundings of every call of a kernel: what a careless kernel gets wrong shows.

Tensors lie between guard zones, memory that nobody has initialised is full of NaN, and on a GPU
the inputs come late, on a stream of their own.
"""
