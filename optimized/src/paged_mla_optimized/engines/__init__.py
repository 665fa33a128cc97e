"""Adapters: what serving engines call, over what this package offers.

An adapter converts conventions and holds no kernel: whose rows come first, how rows and tokens are
padded, what a length counts, where scales lie, in which layout and base an lse is wanted. What it
cannot convert it refuses, with a reason. Pure conversions stand in files that import no engine;
classes that engines ask for stand in files that nothing but the engine imports.
"""
