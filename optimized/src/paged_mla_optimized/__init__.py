"""Paged MLA attention in Triton for serving engines.

Every name is imported when it is first used, so that :mod:`paged_mla_optimized.planning.families`,
which says what kernel serves a step, can be imported without torch and Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_mla_shared.lazy import import_name

if TYPE_CHECKING:
    from paged_mla_optimized.api import PagedMla
    from paged_mla_optimized.cache import LatentCache, empty_cache
    from paged_mla_optimized.config import MlaConfig, SoftmaxScaleWarning
    from paged_mla_optimized.inspect.record import record
    from paged_mla_optimized.inspect.samples import Samples
    from paged_mla_optimized.launchers.merge import merge_partials
    from paged_mla_optimized.layer import MlaLayer
    from paged_mla_optimized.layer_config import LayerConfig
    from paged_mla_optimized.planned import PlannedStep
    from paged_mla_optimized.prefill import Prefill
    from paged_mla_optimized.prefill_config import PrefillConfig
    from paged_mla_optimized.step import MlaStep, RequestMap
    from paged_mla_optimized.stepping.drafts import DraftSteps, ExtendWindow
    from paged_mla_optimized.stepping.events import LayerEvents
    from paged_mla_optimized.stepping.graph import GraphedStep, StaleGraph
    from paged_mla_optimized.stepping.inputs import Bucket, StepInputs, StepView
    from paged_mla_optimized.weights import HeadWeights
    from paged_mla_shared.errors import InvalidArgument, Unsupported
    from paged_mla_shared.problem import Rope, RopePairing, Yarn

_HOMES = {
    "Bucket": "stepping.inputs",
    "DraftSteps": "stepping.drafts",
    "ExtendWindow": "stepping.drafts",
    "GraphedStep": "stepping.graph",
    "HeadWeights": "weights",
    "LatentCache": "cache",
    "LayerConfig": "layer_config",
    "LayerEvents": "stepping.events",
    "MlaConfig": "config",
    "MlaLayer": "layer",
    "MlaStep": "step",
    "PagedMla": "api",
    "PlannedStep": "planned",
    "Prefill": "prefill",
    "PrefillConfig": "prefill_config",
    "RequestMap": "step",
    "Samples": "inspect.samples",
    "SoftmaxScaleWarning": "config",
    "StaleGraph": "stepping.graph",
    "StepInputs": "stepping.inputs",
    "StepView": "stepping.inputs",
    "empty_cache": "cache",
    "merge_partials": "launchers.merge",
    "record": "inspect.record",
}
_SHARED_HOMES = {
    "InvalidArgument": "errors",
    "Rope": "problem",
    "RopePairing": "problem",
    "Unsupported": "errors",
    "Yarn": "problem",
}
_HOME = {name: f"{__name__}.{home}" for name, home in _HOMES.items()}
_HOME |= {name: f"paged_mla_shared.{home}" for name, home in _SHARED_HOMES.items()}

__all__ = [
    "Bucket",
    "DraftSteps",
    "ExtendWindow",
    "GraphedStep",
    "HeadWeights",
    "InvalidArgument",
    "LatentCache",
    "LayerConfig",
    "LayerEvents",
    "MlaConfig",
    "MlaLayer",
    "MlaStep",
    "PagedMla",
    "PlannedStep",
    "Prefill",
    "PrefillConfig",
    "RequestMap",
    "Rope",
    "RopePairing",
    "Samples",
    "SoftmaxScaleWarning",
    "StaleGraph",
    "StepInputs",
    "StepView",
    "Unsupported",
    "Yarn",
    "empty_cache",
    "merge_partials",
    "record",
]


def __getattr__(name: str) -> Any:
    """Import a name from the module that defines it."""
    return import_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    """Return every public name, imported or not."""
    return sorted(__all__)
