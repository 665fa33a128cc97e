"""Every mutant as a backend, by its name.

``--backend paged_mla_conformance.meta.mutants.backends:lse-in-base-2`` runs the suite on one.

A mutant of the engine is a right backend; :func:`broken_engine` makes the schedules wrong that it
is asked.
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
    """The reference with its runners wrapped. One element type, to be quick."""

    name: str = RIGHT_BACKEND
    capabilities: Capabilities = FLOAT32
    wrap: Callable[[Problem, Runner], Runner] = _unwrapped
    wrap_unchecked: Callable[[Problem, Runner], Runner] = _unwrapped

    def prepare(self, problem: Problem) -> Runner:
        """Build a runner that breaks a rule."""
        return self.wrap(problem, super().prepare(problem))

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Build one that looks at no values of a step."""
        runner = self.wrap(problem, super().prepare_unchecked(problem))
        return self.wrap_unchecked(problem, runner)


def mutant(name: str) -> MutantBackend:
    """Return the backend of a mutant; "right" is the one that none of them has changed.

    One that breaks S-11 declares every cache format, the others the plain one, to be quick. One
    that breaks S-22 declares bfloat16, in which weights are rounded, the others float32.
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
    """Return a context in which the simulated engine has the mutant's fault, if it has one."""
    fault = MUTANTS.get(name)
    if fault is None or fault.kind is not Kind.ENGINE:
        return nullcontext()
    broken: AbstractContextManager[None] = fault.change()
    return broken


def changes(name: str) -> frozenset[str]:
    """Return the ops that a mutant does otherwise than the right backend, "schedules" or "bounded".

    The last one is what it does with steps that no rule allows.
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
        raise AttributeError(f"no mutant is called {name!r}")
    return lambda: mutant(name)
