"""The entry point that registers this backend in SGLang."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.sglang.versions import OLDEST
from paged_mla_optimized.engines.tensors import FLAT_FP8
from paged_mla_optimized.runtime.log import LOGGER

NAME = "paged_mla"
"""The value of SGLang's option ``attention_backend`` that selects this backend."""

GROUP = "sglang.srt.plugins"
"""The group of entry points that SGLang calls in each of its processes."""

FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Register the name of the backend and the function that creates it.

    SGLang calls this function once in each of its processes. If SGLang is too old, the function
    logs a warning and registers nothing.
    """
    installed = version("sglang")
    if not serves(installed, OLDEST):
        LOGGER.warning(
            "paged_mla registers no attention backend: SGLang %s is installed, and 0.5.17 or later "
            "is required",
            installed,
        )
        return
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )
    from sglang.srt.server_args import (
        add_attention_backend_choices,
        add_chunked_prefix_cache_attention_backend,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    add_attention_backend_choices([NAME])
    add_chunked_prefix_cache_attention_backend(NAME)
    add_deterministic_attention_backend_choices([NAME])
    # SGLang requires this registration for MLA models. The backend rejects a radix cache itself.
    add_radix_supported_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """Return the backend of a model runner, and complete the registration in SGLang.

    The registration of layers and of draft backends uses modules that SGLang has not imported when
    it loads plugins.
    """
    from paged_mla_optimized.engines.sglang.backend import PagedMlaBackend
    from paged_mla_optimized.engines.sglang.dispatch import teach

    backend = PagedMlaBackend(runner)
    scaling = getattr(runner.model_config.hf_text_config, "llama_4_scaling", None)
    teach(
        NAME,
        is_fp8=backend.rows.config.cache_format == FLAT_FP8,
        takes_parts=scaling is None,  # SGLang applies llama_4_scaling only to joined queries
    )
    hook_drafts()
    return backend


@cache
def hook_drafts() -> None:
    """Add a hook to SGLang's factory of draft backends, once: its table of names is fixed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from paged_mla_optimized.engines.sglang.drafts import add_to_table

    HookRegistry.register(FACTORY, add_to_table(NAME), HookType.AROUND)
    HookRegistry.apply_hooks()
