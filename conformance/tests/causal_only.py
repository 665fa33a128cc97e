"""A backend that lacks a core capability and says so."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend


def create() -> ReferenceBackend:
    return ReferenceBackend(capabilities=replace(CAPABILITIES, masks=frozenset({"causal"})))
