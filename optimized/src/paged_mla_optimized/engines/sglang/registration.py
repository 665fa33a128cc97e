"""The entry point by which SGLang finds this backend."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.sglang.versions import OLDEST
from paged_mla_optimized.engines.tensors import FLAT_FP8
from paged_mla_optimized.runtime.log import LOGGER

NAME = "paged_mla"
"""What ``attention_backend`` is set to."""

GROUP = "sglang.srt.plugins"
"""Of entry points: SGLang calls them in each of its processes."""

FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Tell SGLang the name, and how the backend is made.

    SGLang calls this once in each of its processes. Where it is too old, a warning is logged and
    it goes on without this backend.
    """
    installed = version("sglang")
    if not serves(installed, OLDEST):
        LOGGER.warning("no attention backend for SGLang %s: made for 0.5.17 and later", installed)
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
    # Models of MLA need this one as well; the backend then refuses a radix cache itself.
    add_radix_supported_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """Return the backend of a model runner; on the way SGLang learns the rest.

    What it learns lies in modules of models and drafts, which SGLang has not imported when plugins
    are loaded.
    """
    from paged_mla_optimized.engines.sglang.backend import PagedMlaBackend
    from paged_mla_optimized.engines.sglang.dispatch import teach

    backend = PagedMlaBackend(runner)
    scaling = getattr(runner.model_config.hf_text_config, "llama_4_scaling", None)
    teach(
        NAME,
        is_fp8=backend.rows.config.cache_format == FLAT_FP8,
        takes_parts=scaling is None,  # SGLang multiplies only what it has joined
    )
    hook_drafts()
    return backend


@cache
def hook_drafts() -> None:
    """Let draft models have the backend, once: SGLang's table of names is fixed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from paged_mla_optimized.engines.sglang.drafts import add_to_table

    HookRegistry.register(FACTORY, add_to_table(NAME), HookType.AROUND)
    HookRegistry.apply_hooks()
