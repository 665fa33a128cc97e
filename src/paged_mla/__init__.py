"""Paged MLA attention: the classes that engines embed, and the errors that they raise.

Every name is imported when it is first used, so that ``import paged_mla`` needs neither torch nor
Triton. The kernels need the extra ``optimized``: ``pip install "paged-mla[optimized]"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paged_mla_optimized as _kernels
from paged_mla_shared import __version__
from paged_mla_shared.lazy import import_name

if TYPE_CHECKING:
    from paged_mla_optimized import *  # noqa: F403 - its __all__ is joined below
    from paged_mla_optimized.parallel import ContextParallelMla, heads_of_rank, local_len

_HOMES = {
    "paged_mla_optimized.parallel": ("ContextParallelMla", "heads_of_rank", "local_len"),
    "paged_mla_optimized": _kernels.__all__,
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["ContextParallelMla", "__version__", "heads_of_rank", "local_len"]
__all__ += _kernels.__all__


def __getattr__(name: str) -> Any:
    """Import a name from the package that defines it."""
    try:
        return import_name(__name__, _HOME, name)
    except ModuleNotFoundError as error:
        if error.name not in {"torch", "triton"}:
            raise
        message = f'paged_mla.{name} needs {error.name}: pip install "paged-mla[optimized]"'
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    """Return every public name, also names that are not imported yet."""
    return sorted(__all__)
