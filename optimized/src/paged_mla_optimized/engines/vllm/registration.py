"""The entry point of the group ``vllm.general_plugins``, which registers both backends."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.vllm.versions import OLDEST
from paged_mla_optimized.runtime.log import LOGGER

NAME = "CUSTOM"
"""The member of vLLM's backend enums that every release reserves for plugins."""

OWN_NAME = "PAGED_MLA"
"""The member that this package adds to these enums, in releases that allow it."""

FIRST_WITH_NAMES = (0, 32)
"""The first release of vLLM to whose enums a plugin can add members."""

_HOME = "paged_mla_optimized.engines.vllm"
BACKEND = f"{_HOME}.backend.PagedMlaBackend"
PREFILL_BACKEND = f"{_HOME}.prefill.PagedMlaPrefillBackend"


class ClassPath(str):
    """The import path of a backend class, which is the value of its enum member.

    A spawned process of vLLM unpickles the configuration before it loads plugins, and a member is
    pickled as its value. Unpickling this value therefore registers the members.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered_path, (str(self),)


def _registered_path(path: str) -> ClassPath:
    register()
    return ClassPath(path)


def register() -> None:
    """Register the import paths of both backends; vLLM imports a class when a user selects it.

    vLLM calls this function in each of its processes, possibly twice. If another plugin has
    registered :data:`NAME`, the function logs a warning and leaves the name to that plugin. If vLLM
    is too old, the function logs a warning and registers nothing.
    """
    installed = version("vllm")
    if not serves(installed, OLDEST):
        LOGGER.warning(
            "paged_mla registers no attention backend: vLLM %s is installed, and 0.25 or later is "
            "required",
            installed,
        )
        return
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    for members, tell, path in (
        (AttentionBackendEnum, register_backend, BACKEND),
        (MLAPrefillBackendEnum, register_mla_prefill_backend, PREFILL_BACKEND),
    ):
        if hasattr(members, "register") and OWN_NAME not in members.__members__:
            tell(OWN_NAME, ClassPath(path))
        member = members[NAME]
        if member.is_overridden() and member.get_path() != path:
            LOGGER.warning(
                "another plugin has registered the backend name %s: the name selects %s instead of "
                "%s. Use the name %s (vLLM 0.32 and later), or disable the other plugin with "
                "VLLM_PLUGINS=paged_mla",
                *(NAME, member.get_path(), path, OWN_NAME),
            )
        else:
            tell(member, path)


def name_of_release(release: str) -> str:
    """Return the name that selects this package's attention backend in a release of vLLM."""
    return OWN_NAME if serves(release, FIRST_WITH_NAMES) else NAME


def name_in(members: Any) -> str:
    """Return the name of this package's member in one of vLLM's enums.

    Parameters
    ----------
    members : type
        ``AttentionBackendEnum`` or ``MLAPrefillBackendEnum``.
    """
    return OWN_NAME if OWN_NAME in members.__members__ else NAME
