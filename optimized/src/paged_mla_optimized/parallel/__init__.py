"""Attention on a group of ranks that divide heads (tensor parallel) or cached tokens (S-18)."""

from paged_mla_optimized.parallel.context import ContextParallelMla
from paged_mla_optimized.parallel.exchange import link_bytes
from paged_mla_optimized.parallel.heads import heads_of_rank
from paged_mla_optimized.parallel.sharding import local_len

__all__ = ["ContextParallelMla", "heads_of_rank", "link_bytes", "local_len"]
