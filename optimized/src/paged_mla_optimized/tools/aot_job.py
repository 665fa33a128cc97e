"""One kernel to compile, in the form that Triton's compiler takes."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from paged_mla_optimized.runtime.kernel_spec import FP_FUSION, STRIDE, KernelSpec
from paged_mla_optimized.triton_compat.compilation import source_of
from paged_mla_optimized.triton_compat.kernels import module_of, name_of, parameters_of

Path = tuple[int, ...]  # the index of a parameter, and then the index of a record's field

_ALIGNED = [["tt.divisibility", 16]]
_COMPILED = {"num_warps": 4, "num_stages": 3}  # the defaults of options that affect the code
_REGISTERS = "maxnreg"


@dataclass(frozen=True)
class Job:
    """One kernel to compile.

    Parameters
    ----------
    name : str
        The name of the variant.
    spec : KernelSpec
    dtype : str
        The dtype of queries and new latents, in the spelling of ``runtime/kernel_spec.py``; "i32"
        for the kernels of a plan.
    """

    name: str
    spec: KernelSpec
    dtype: str

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, with the kernel's module and name instead of the kernel."""
        spec = self.spec
        found = (module_of(spec.kernel), name_of(spec.kernel))
        return {
            "name": self.name,
            "dtype": self.dtype,
            "spec": (found, spec.constants, spec.types, spec.options),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        (module, name), *rest = state["spec"]
        spec = KernelSpec(getattr(importlib.import_module(module), name), *rest)
        self.__dict__.update(state, spec=spec)

    @property
    def kernel(self) -> Any:
        """The kernel."""
        return self.spec.kernel

    @property
    def constants(self) -> dict[str, Any]:
        """The value of each constant by its name, including the fields of records."""
        return self.spec.flat_constants

    @property
    def source(self) -> Any:
        """The source object of Triton's compiler."""
        return source_of(self.kernel, self.signature, self.compiled_in, self.attributes)

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options that affect the code: those of the spec, or the defaults."""
        given = {n: v for n, v in self.spec.options.items() if n in {*_COMPILED, _REGISTERS}}
        return _COMPILED | given | FP_FUSION

    @property
    def signature(self) -> dict[str, Any]:
        """The type of each parameter, in order, or "constexpr"; for a record, a record of types."""
        return {name: _signed(value) for name, value in self._types().items()}

    @property
    def compiled_in(self) -> dict[Path, Any]:
        """The constants by path, and the arguments that Triton makes constants: 1 and ``None``."""
        constants: dict[Path, Any] = {}
        for number, (name, value) in enumerate(self._types().items()):
            if name in self.spec.constants:
                constants |= _by_path(number, self.spec.constants[name])
            else:
                found = _by_path(number, value)
                constants |= {path: _VALUES[one] for path, one in found.items() if one in _VALUES}
        return constants

    @property
    def attributes(self) -> dict[Path, list[list[Any]]]:
        """The alignment attribute of each argument that is aligned to 16, by path."""
        found: dict[Path, list[list[Any]]] = {}
        for number, value in enumerate(self._types().values()):
            for path, one in _by_path(number, value).items():
                if isinstance(one, str) and one.endswith(":16"):
                    found[path] = _ALIGNED
        return found

    @property
    def identity(self) -> Hashable:
        """A key that differs between any two jobs with different code."""
        parts = (self.compiled_in, self.signature, self.attributes, self.options)
        return name_of(self.kernel), *(tuple((k, str(v)) for k, v in p.items()) for p in parts)

    def features(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the value of each constant, type and option."""
        yield from ((name.lower(), str(value)) for name, value in self.constants.items())
        for name, value in self._types().items():
            if name not in self.spec.constants:
                yield name, "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
        yield from ((name, str(value)) for name, value in self.options.items())

    def _types(self) -> dict[str, Any]:
        """Return the type of each parameter with its alignment, or "constexpr"."""
        found: dict[str, Any] = {}
        for parameter in parameters_of(self.kernel):
            name = parameter.name
            if name in self.spec.constants:
                found[name] = _each(self.spec.constants[name], lambda _: "constexpr")
                continue
            default = STRIDE if name.startswith("stride") else "i32"
            found[name] = _each(
                self.spec.types.get(name, default),
                _seen if parameter.is_specialized else _unseen,
            )
            if not parameter.is_specialized_on_alignment:
                found[name] = found[name].removesuffix(":16")
        return found


_VALUES = {"i32:1": 1, None: None}  # the values of types that Triton makes constants


def _each(value: Any, change: Any) -> Any:
    """Return a record with `change` applied to every field, or `change` of another value."""
    return type(value)(*map(change, value)) if isinstance(value, tuple) else change(value)


def _seen(type_: str | None) -> str | None:
    """Return the type of a parameter that Triton specializes on: tensors are aligned to 16."""
    return f"{type_}:16" if type_ is not None and type_.startswith("*") else type_


def _unseen(type_: str) -> str:
    """Return the type of a parameter that Triton does not specialize on."""
    return type_.partition(":")[0]


def _signed(value: Any) -> Any:
    """Return a type in the form of a signature."""
    if isinstance(value, tuple):
        return type(value)(*map(_signed, value))
    if value in _VALUES:
        return "constexpr"
    return value.removesuffix(":16")


def _by_path(number: int, value: Any) -> dict[Path, Any]:
    """Return the values of a parameter by path: one for each field of a record."""
    if isinstance(value, tuple):
        return {(number, field): one for field, one in enumerate(value)}
    return {(number,): value}
