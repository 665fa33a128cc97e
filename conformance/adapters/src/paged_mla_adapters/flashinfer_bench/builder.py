"""Solutions that are compiled: FlashInfer-Bench builds them, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from paged_mla_adapters.flashinfer_bench.definition import Definition
from paged_mla_shared.errors import InvalidArgument

_PACKAGE = "flashinfer_bench"


def check_installed(argument: str, language: str) -> None:
    """Refuse a language whose sources nothing here can build.

    Parameters
    ----------
    argument : str
        What an error calls it.
    language : str

    Raises
    ------
    InvalidArgument
        FlashInfer-Bench is not installed.
    """
    if find_spec(_PACKAGE) is None:
        allowed = f"python or triton; and {language} after pip install flashinfer-bench"
        raise InvalidArgument(argument, language, allowed)


def build(definition: Definition, solution: dict[str, Any]) -> Callable[..., Any]:
    """Return what a solution's sources are compiled to: it takes its arguments in order.

    Parameters
    ----------
    definition : Definition
    solution : dict
        The document of a solution's file.

    Raises
    ------
    RuntimeError
        FlashInfer-Bench cannot build it: no builder takes it, or a compiler refuses it.
    """
    data, compiling = (import_module(f"{_PACKAGE}.{name}") for name in ("data", "compile"))
    registry = compiling.BuilderRegistry.get_instance()
    built: Callable[..., Any] = registry.build(
        data.Definition(**definition.document()), data.Solution(**solution)
    )
    return built
