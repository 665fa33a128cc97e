"""A backend for every mutant, by the name of the mutant.

``--backend paged_mla_conformance.meta.mutants.backends:lse-in-base-2`` runs the suite on a mutant.
The backend of an engine mutant is right; :func:`broken_engine` makes its schedules wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.faults import IN_16_BITS, Kind, Shows
from paged_mla_reference.oracle import RIGHT
from paged_mla_shared.backend import Capabilities, Runner
from paged_mla_shared.problem import Problem

RIGHT_BACKEND = "right"
RIGHT_IN_EVERY_FORMAT = "right-in-every-format"
SCHEDULES = "schedules"
BOUNDED = "bounded"

FLOAT32 = replace(CAPABILITIES, dtypes=frozenset({"float32"}), cache_formats=frozenset({"fp32"}))
BFLOAT16 = replace(CAPABILITIES, dtypes=frozenset({"bfloat16"}), cache_formats=frozenset({"bf16"}))
EVERY_FORMAT = replace(FLOAT32, cache_formats=CAPABILITIES.cache_formats)


def _unwrapped(_: Problem, runner: Runner) -> Runner:
    return runner


@dataclass(frozen=True)
class MutantBackend(ReferenceBackend):
    """The reference with wrapped runners. It declares one element type, so that tests are fast."""

    name: str = RIGHT_BACKEND
    capabilities: Capabilities = FLOAT32
    wrap: Callable[[Problem, Runner], Runner] = _unwrapped
    wrap_unchecked: Callable[[Problem, Runner], Runner] = _unwrapped

    def prepare(self, problem: Problem) -> Runner:
        """Return the reference's runner, wrapped by `wrap`."""
        return self.wrap(problem, super().prepare(problem))

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Return a runner that does not validate the values of a step."""
        runner = self.wrap(problem, super().prepare_unchecked(problem))
        return self.wrap_unchecked(problem, runner)


def mutant(name: str) -> MutantBackend:
    """Return the backend of a mutant; any other name gives a backend without a fault.

    Mutants that break S-11 declare every cache format, the others only the plain format, so that
    tests are fast. Mutants that are only wrong in 16 bits declare bfloat16, the others float32.
    """
    backend = MutantBackend(name=name, capabilities=_capabilities(name))
    fault = MUTANTS.get(name)
    if fault is None or fault.kind is Kind.ENGINE:
        return backend
    if fault.kind is Kind.KERNEL:
        return replace(backend, oracle=fault.change(RIGHT))
    if fault.shows is Shows.ILLEGAL_STEPS:
        return replace(backend, wrap_unchecked=fault.change)
    return replace(backend, wrap=fault.change)


def _capabilities(name: str) -> Capabilities:
    if name in IN_16_BITS:
        return BFLOAT16
    formats = name == RIGHT_IN_EVERY_FORMAT or (name in MUTANTS and "S-11" in MUTANTS[name].rules)
    return EVERY_FORMAT if formats else FLOAT32


def broken_engine(name: str) -> AbstractContextManager[None]:
    """Return a context in which the simulated engine has the fault of an engine mutant.

    For other mutants the context has no effect.
    """
    fault = MUTANTS.get(name)
    if fault is None or fault.kind is not Kind.ENGINE:
        return nullcontext()
    broken: AbstractContextManager[None] = fault.change()
    return broken


def changes(name: str) -> frozenset[str]:
    """Return the operations in which a mutant may differ from the right backend.

    The set is {"schedules"} for an engine mutant, and {"bounded"} for a mutant that only differs in
    illegal steps.
    """
    fault = MUTANTS.get(name)
    if fault is not None and fault.kind is Kind.ENGINE:
        return frozenset({SCHEDULES})
    if fault is not None and fault.shows is Shows.ILLEGAL_STEPS:
        return frozenset({BOUNDED})
    if fault is None or fault.kind is Kind.RUNNER:
        return CAPABILITIES.ops
    wrong = vars(fault.change(RIGHT))
    functions = {
        function for function, right in vars(RIGHT).items() if wrong[function] is not right
    }
    return frozenset("plan" if function == "metadata" else function for function in functions)


def __getattr__(name: str) -> Callable[[], MutantBackend]:
    """Return the factory of a mutant."""
    if name not in {*MUTANTS, RIGHT_BACKEND, RIGHT_IN_EVERY_FORMAT}:
        raise AttributeError(f"no mutant has the name {name!r}")
    return lambda: mutant(name)
