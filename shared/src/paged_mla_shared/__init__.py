"""Types, shapes and cases that all Paged MLA packages share; this package has no algorithms.

The axes in the shape comments of all packages:

====  ==========================================================================
B     rows (requests) of a batch
T     query tokens of the step, including padded tokens
H     query heads of this rank
R     ``kv_lora_rank``: width of the cached latent ``ckv``
P     ``qk_rope_head_dim``: width of the cached rotated key ``k_pe``
N, V  ``qk_nope_head_dim``, ``v_head_dim`` of the materialized heads
M     width of the block table
====  ==========================================================================
"""

__version__ = "0.1.0"
