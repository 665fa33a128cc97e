"""Modules with the names, the signatures and the conventions of other libraries.

Code that was written for such a library runs on this package's kernels once it imports the module
here instead. Each module says which release its signatures are of, and refuses what no kernel
serves.
"""
