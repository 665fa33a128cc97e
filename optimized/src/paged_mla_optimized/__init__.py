"""Paged MLA attention in Triton for serving engines."""

from paged_mla_optimized.api import PagedMla
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.drafts import DraftSteps, ExtendWindow
from paged_mla_optimized.events import LayerEvents
from paged_mla_optimized.graph import GraphedStep, StaleGraph
from paged_mla_optimized.inputs import Bucket, StepInputs, StepView
from paged_mla_optimized.merge import merge_partials
from paged_mla_optimized.tables import RequestMap

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "DraftSteps",
    "ExtendWindow",
    "GraphedStep",
    "LayerEvents",
    "MlaConfig",
    "PagedMla",
    "RequestMap",
    "StaleGraph",
    "StepInputs",
    "StepView",
    "merge_partials",
]
