"""Paged MLA attention in Triton for serving engines."""

from paged_mla_optimized.api import PagedMla
from paged_mla_optimized.cache import LatentCache
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.inspect.record import record
from paged_mla_optimized.inspect.samples import Samples
from paged_mla_optimized.launchers.merge import merge_partials
from paged_mla_optimized.layer import MlaLayer
from paged_mla_optimized.layer_config import LayerConfig
from paged_mla_optimized.prefill import Prefill, PrefillConfig
from paged_mla_optimized.stepping.drafts import DraftSteps, ExtendWindow
from paged_mla_optimized.stepping.events import LayerEvents
from paged_mla_optimized.stepping.graph import GraphedStep, StaleGraph
from paged_mla_optimized.stepping.inputs import Bucket, StepInputs, StepView
from paged_mla_optimized.tables import RequestMap
from paged_mla_optimized.weights import HeadWeights

__all__ = [
    "Bucket",
    "DraftSteps",
    "ExtendWindow",
    "GraphedStep",
    "HeadWeights",
    "LatentCache",
    "LayerConfig",
    "LayerEvents",
    "MlaConfig",
    "MlaLayer",
    "PagedMla",
    "Prefill",
    "PrefillConfig",
    "RequestMap",
    "Samples",
    "StaleGraph",
    "StepInputs",
    "StepView",
    "merge_partials",
    "record",
]
