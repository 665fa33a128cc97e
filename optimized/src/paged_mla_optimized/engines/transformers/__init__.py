"""DeepSeek-V2 and V3 of the transformers library over a paged cache of latents.

Importing it registers the attention implementation "paged_mla".
"""

from paged_mla_optimized.engines.transformers.attention import register
from paged_mla_optimized.engines.transformers.cache import PagedMlaCache
from paged_mla_optimized.engines.transformers.pool import LatentPool

__all__ = ["LatentPool", "PagedMlaCache"]

register()
