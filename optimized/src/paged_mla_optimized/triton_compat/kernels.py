"""Properties of a Triton kernel: its name, its parameters, and its language."""

from __future__ import annotations

from typing import Any, NamedTuple


class Parameter(NamedTuple):
    """A parameter of a kernel, and the properties of its argument on which Triton specializes."""

    name: str
    is_specialized: bool  # on the value 1, and on multiples of 16
    is_specialized_on_alignment: bool


def name_of(kernel: Any) -> str:
    """Return the name of a kernel's function."""
    name: str = kernel.fn.__name__
    return name


def module_of(kernel: Any) -> str:
    """Return the name of the module that defines a kernel."""
    module: str = kernel.fn.__module__
    return module


def parameter_names(kernel: Any) -> list[str]:
    """Return the names of a kernel's parameters, in order."""
    return list(kernel.arg_names)


def parameters_of(kernel: Any) -> list[Parameter]:
    """Return a kernel's parameters, in order; the interpreter has none."""
    return [
        Parameter(one.name, not one.do_not_specialize, not one.do_not_specialize_on_alignment)
        for one in getattr(kernel, "params", ())
    ]


def is_gluon(kernel: Any) -> bool:
    """Return whether a kernel is written in Gluon."""
    answer: bool = kernel.is_gluon()
    return answer
