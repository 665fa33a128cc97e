"""Adapters through which serving engines call this package.

An adapter converts an engine's conventions and contains no kernel. The conventions are the order
and the padding of rows and tokens, the meaning of lengths, the place of scales, and the layout and
the base of an lse. An adapter raises an error with a reason for an input that it cannot convert.
Pure conversions are in files that import no engine. The classes that an engine instantiates are in
files that only the engine imports.
"""
