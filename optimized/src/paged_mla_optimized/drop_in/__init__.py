"""Modules with the names, the signatures and the conventions of other libraries.

Code for such a library runs on this package's kernels after it imports the module of this package
instead. Each module names the release whose signatures it has, and raises ``Unsupported`` for
options that no kernel supports.
"""
