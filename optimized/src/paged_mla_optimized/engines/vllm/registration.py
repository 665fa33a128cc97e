"""The entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.vllm.versions import OLDEST
from paged_mla_optimized.runtime.log import LOGGER

NAME = "CUSTOM"
"""The member that vLLM's enums of backends keep free for plugins, in every release."""

OWN_NAME = "PAGED_MLA"
"""The member that this package adds to them, where the release has a call for it."""

FIRST_WITH_NAMES = (0, 32)
"""The first release of vLLM whose enums take further members."""

_HOME = "paged_mla_optimized.engines.vllm"
BACKEND = f"{_HOME}.backend.PagedMlaBackend"
PREFILL_BACKEND = f"{_HOME}.prefill.PagedMlaPrefillBackend"


class ClassPath(str):
    """The value of an added member: where its class is.

    A spawned process of vLLM unpickles the configuration before it loads plugins, and a member is
    pickled as its value. So this value registers the members as it is unpickled.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered_path, (str(self),)


def _registered_path(path: str) -> ClassPath:
    register()
    return ClassPath(path)


def register() -> None:
    """Tell vLLM where the classes are; it imports them when somebody chooses them.

    vLLM calls this in each of its processes, maybe twice. Where another plugin has taken
    :data:`NAME`, a warning is logged, and that plugin keeps the name. Where vLLM is too old, a
    warning is logged and vLLM goes on without these backends.
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

    for members, tell, path in (
        (AttentionBackendEnum, register_backend, BACKEND),
        (MLAPrefillBackendEnum, register_mla_prefill_backend, PREFILL_BACKEND),
    ):
        if hasattr(members, "register") and OWN_NAME not in members.__members__:
            tell(OWN_NAME, ClassPath(path))
        member = members[NAME]
        if member.is_overridden() and member.get_path() != path:
            LOGGER.warning(
                "another plugin has the name %s: it selects %s, not %s. Choose %s (vLLM 0.32 and "
                "later), or leave the other plugin out with VLLM_PLUGINS=paged_mla",
                *(NAME, member.get_path(), path, OWN_NAME),
            )
        else:
            tell(member, path)


def name_of_release(release: str) -> str:
    """Return the name by which a release of vLLM selects this package's attention."""
    return OWN_NAME if serves(release, FIRST_WITH_NAMES) else NAME


def name_in(members: Any) -> str:
    """Return the name that one of vLLM's enums has this package's class under.

    Parameters
    ----------
    members : type
        ``AttentionBackendEnum`` or ``MLAPrefillBackendEnum``.
    """
    return OWN_NAME if OWN_NAME in members.__members__ else NAME
