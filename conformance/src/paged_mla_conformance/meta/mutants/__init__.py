"""Mutants: backends with one fault of the catalogue, which prove that the suite finds faults."""

from __future__ import annotations

from paged_mla_reference.faults import CATALOGUE, Fault, Shows

MUTANTS: dict[str, Fault] = {
    name: fault for name, fault in CATALOGUE.items() if fault.shows is not Shows.AUDIT
}
"""Every fault that can appear in a backend, by name."""
