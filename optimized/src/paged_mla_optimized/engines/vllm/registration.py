"""The entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations

from importlib.metadata import version

from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.vllm.versions import OLDEST
from paged_mla_optimized.runtime.log import LOGGER

NAME = "CUSTOM"
"""The member of vLLM's enums that is free for plugins."""

_HOME = "paged_mla_optimized.engines.vllm"
BACKEND = f"{_HOME}.backend.PagedMlaBackend"
PREFILL_BACKEND = f"{_HOME}.prefill.PagedMlaPrefillBackend"


def register() -> None:
    """Tell vLLM where the classes are; it imports them when somebody chooses them.

    vLLM calls this in each of its processes, maybe twice. Where another plugin has taken the name,
    or where vLLM is too old, a warning is logged and vLLM goes on without these backends.
    """
    installed = version("vllm")
    if not serves(installed, OLDEST):
        LOGGER.warning("no attention backend for vLLM %s: made for 0.25 and later", installed)
        return
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    for member, tell, path in (
        (AttentionBackendEnum[NAME], register_backend, BACKEND),
        (MLAPrefillBackendEnum[NAME], register_mla_prefill_backend, PREFILL_BACKEND),
    ):
        if member.is_overridden() and member.get_path() != path:
            LOGGER.warning("%s is %s already; %s is not registered", NAME, member.get_path(), path)
        else:
            tell(member, path)
