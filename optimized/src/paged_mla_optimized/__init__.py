"""Paged MLA attention in Triton for serving engines."""

from paged_mla_optimized.api import PagedMla
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.merge import merge_partials
from paged_mla_optimized.tables import RequestMap

__version__ = "0.1.0"

__all__ = ["MlaConfig", "PagedMla", "RequestMap", "merge_partials"]
