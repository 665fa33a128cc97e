"""Mutants: backends with one fault of the catalogue, as proof that the suite can fail."""

from __future__ import annotations

from paged_mla_reference.faults import CATALOGUE, Fault, Shows

MUTANTS: dict[str, Fault] = {
    name: fault for name, fault in CATALOGUE.items() if fault.shows is not Shows.AUDIT
}
"""Every fault that a backend can show, by name."""
