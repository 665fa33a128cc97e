"""Builds of compiled solutions, which need an installed FlashInfer-Bench."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from paged_mla_adapters.flashinfer_bench.definition import Definition
from paged_mla_shared.errors import InvalidArgument

_PACKAGE = "flashinfer_bench"


def check_installed(argument: str, language: str) -> None:
    """Raise an error if FlashInfer-Bench, which builds compiled languages, is not installed.

    Parameters
    ----------
    argument : str
        The name of the language's field in an error.
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
    """Compile a solution and return its function, which takes positional arguments.

    Parameters
    ----------
    definition : Definition
    solution : dict
        The document of a solution's file.

    Raises
    ------
    RuntimeError
        FlashInfer-Bench has no builder for the solution, or a compiler reports an error.
    """
    data, compiling = (import_module(f"{_PACKAGE}.{name}") for name in ("data", "compile"))
    registry = compiling.BuilderRegistry.get_instance()
    built: Callable[..., Any] = registry.build(
        data.Definition(**definition.document()), data.Solution(**solution)
    )
    return built
