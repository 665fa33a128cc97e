"""Paged MLA attention in Triton for serving engines.

A name is imported at its first use. Therefore :mod:`paged_mla_optimized.planning.families`, which
chooses the kernel of a step, can be imported without torch and Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paged_mla_shared.lazy import import_name

if TYPE_CHECKING:
    from paged_mla_optimized.api.layer import MlaLayer
    from paged_mla_optimized.api.paged_mla import PagedMla
    from paged_mla_optimized.api.planned import PlannedStep
    from paged_mla_optimized.api.prefill import Prefill
    from paged_mla_optimized.config.attention import MlaConfig, SoftmaxScaleWarning
    from paged_mla_optimized.config.layer import LayerConfig
    from paged_mla_optimized.config.prefill import PrefillConfig
    from paged_mla_optimized.inspect.record import record
    from paged_mla_optimized.inspect.samples import Samples
    from paged_mla_optimized.operations.merge.partials import merge_partials
    from paged_mla_optimized.serving.drafts import DraftSteps, ExtendWindow
    from paged_mla_optimized.serving.events import LayerEvents
    from paged_mla_optimized.serving.graph import GraphedStep, StaleGraph
    from paged_mla_optimized.serving.inputs import Bucket, StepInputs, StepView
    from paged_mla_optimized.tensors.head_weights import HeadWeights
    from paged_mla_optimized.tensors.latent_cache import LatentCache, empty_cache
    from paged_mla_optimized.tensors.step import MlaStep, RequestMap
    from paged_mla_shared.errors import InvalidArgument, Unsupported
    from paged_mla_shared.problem import Rope, RopePairing, Yarn

_HOMES = {
    "Bucket": "serving.inputs",
    "DraftSteps": "serving.drafts",
    "ExtendWindow": "serving.drafts",
    "GraphedStep": "serving.graph",
    "HeadWeights": "tensors.head_weights",
    "LatentCache": "tensors.latent_cache",
    "LayerConfig": "config.layer",
    "LayerEvents": "serving.events",
    "MlaConfig": "config.attention",
    "MlaLayer": "api.layer",
    "MlaStep": "tensors.step",
    "PagedMla": "api.paged_mla",
    "PlannedStep": "api.planned",
    "Prefill": "api.prefill",
    "PrefillConfig": "config.prefill",
    "RequestMap": "tensors.step",
    "Samples": "inspect.samples",
    "SoftmaxScaleWarning": "config.attention",
    "StaleGraph": "serving.graph",
    "StepInputs": "serving.inputs",
    "StepView": "serving.inputs",
    "empty_cache": "tensors.latent_cache",
    "merge_partials": "operations.merge.partials",
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
    """Import a public name from the module that defines it."""
    return import_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    """Return every public name, imported or not."""
    return sorted(__all__)
