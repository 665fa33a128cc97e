"""One kernel to compile, as Triton's compiler wants it described."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from paged_mla_optimized.runtime.kernel_spec import FP_FUSION, STRIDE, KernelSpec
from paged_mla_optimized.triton_compat.compilation import source_of
from paged_mla_optimized.triton_compat.kernels import module_of, name_of, parameters_of

Path = tuple[int, ...]  # index of a parameter, and of a record's field

_ALIGNED = [["tt.divisibility", 16]]
_COMPILED = {"num_warps": 4, "num_stages": 3}  # options that shape code, unless a spec has others
_REGISTERS = "maxnreg"


@dataclass(frozen=True)
class Job:
    """One kernel to compile.

    Parameters
    ----------
    name : str
    spec : KernelSpec
    dtype : str
        Of queries and new latents, as ``runtime/kernel_spec.py`` spells it; "i32" for the
        kernels of a plan.
    """

    name: str
    spec: KernelSpec
    dtype: str

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to another process: of the kernel, where it is found."""
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
        """Value of each constant by its name, of those in records too."""
        return self.spec.flat_constants

    @property
    def source(self) -> Any:
        """The kernel as Triton's compiler wants it."""
        return source_of(self.kernel, self.signature, self.compiled_in, self.attributes)

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        given = {n: v for n, v in self.spec.options.items() if n in {*_COMPILED, _REGISTERS}}
        return _COMPILED | given | FP_FUSION

    @property
    def signature(self) -> dict[str, Any]:
        """Type of each argument, in order; of a record, a record of types."""
        return {name: _signed(value) for name, value in self._types().items()}

    @property
    def compiled_in(self) -> dict[Path, Any]:
        """The constants, and the arguments that Triton makes constants because they are 1."""
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
        """Which arguments are aligned to 16."""
        found: dict[Path, list[list[Any]]] = {}
        for number, value in enumerate(self._types().values()):
            for path, one in _by_path(number, value).items():
                if isinstance(one, str) and one.endswith(":16"):
                    found[path] = _ALIGNED
        return found

    @property
    def identity(self) -> Hashable:
        """What tells this job from every other one."""
        parts = (self.compiled_in, self.signature, self.attributes, self.options)
        return name_of(self.kernel), *(tuple((k, str(v)) for k, v in p.items()) for p in parts)

    def features(self) -> Iterator[tuple[str, str]]:
        """Yield what else than its name describes a job: constants, types and options."""
        yield from ((name.lower(), str(value)) for name, value in self.constants.items())
        for name, value in self._types().items():
            if name not in self.spec.constants:
                yield name, "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
        yield from ((name, str(value)) for name, value in self.options.items())

    def _types(self) -> dict[str, Any]:
        """Return the type of each parameter with what Triton looks at, and "constexpr"."""
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


_VALUES = {"i32:1": 1, None: None}  # of types that are constants


def _each(value: Any, change: Any) -> Any:
    """Return a record with every field changed, or what else it is."""
    return type(value)(*map(change, value)) if isinstance(value, tuple) else change(value)


def _seen(type_: str | None) -> str | None:
    """Return a type that Triton specialises on: tensors are aligned to 16."""
    return f"{type_}:16" if type_ is not None and type_.startswith("*") else type_


def _unseen(type_: str) -> str:
    """Return a type that Triton does not specialise on."""
    return type_.partition(":")[0]


def _signed(value: Any) -> Any:
    """Return a type as a signature has it."""
    if isinstance(value, tuple):
        return type(value)(*map(_signed, value))
    if value in _VALUES:
        return "constexpr"
    return value.removesuffix(":16")


def _by_path(number: int, value: Any) -> dict[Path, Any]:
    """Return the leaves of a parameter's value by path."""
    if isinstance(value, tuple):
        return {(number, field): one for field, one in enumerate(value)}
    return {(number,): value}
