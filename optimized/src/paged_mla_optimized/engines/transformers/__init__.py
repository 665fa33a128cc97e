"""Run DeepSeek-V2 and V3 of the transformers library over a paged cache of latents.

Importing this module registers the attention implementation "paged_mla".

Examples
--------
With a DeepSeek model on a GPU and tokenized prompts:

>>> model.set_attn_implementation("paged_mla")
>>> pool = LatentPool(model, num_blocks=1024)
>>> output = model.generate(**inputs, cache=PagedMlaCache(pool))

Releases before 5.24 call the argument ``past_key_values``. On a CPU, set ``TRITON_INTERPRET=1``
before the first import of Triton.
"""

from paged_mla_optimized.engines.transformers.attention import register
from paged_mla_optimized.engines.transformers.cache import PagedMlaCache
from paged_mla_optimized.engines.transformers.pool import LatentPool

__all__ = ["LatentPool", "PagedMlaCache"]

register()
