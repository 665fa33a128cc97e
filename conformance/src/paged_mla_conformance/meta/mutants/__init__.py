"""Mutants: backends that are wrong in a known way, as proof that the suite can fail.

``RUNNER`` faults wrap a runner: their change takes a problem and a right runner. So do
``UNBOUNDED`` ones, but only runners that look at no values. ``MUTANTS`` holds them beside those of
the oracle and of the simulated engine.
"""

from __future__ import annotations

from paged_mla_conformance.meta.mutants import captured, known, runners, stale, unbounded
from paged_mla_reference.faults import ENGINE, ORACLE, Fault
from paged_mla_reference.faults.fault import faults_of

RUNNER: dict[str, Fault] = faults_of((captured, stale, known, runners))

UNBOUNDED: dict[str, Fault] = faults_of((unbounded,))

MUTANTS: dict[str, Fault] = {**ORACLE, **RUNNER, **UNBOUNDED, **ENGINE}
