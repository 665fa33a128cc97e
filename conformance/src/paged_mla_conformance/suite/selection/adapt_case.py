"""Adapt a case to a backend that does not declare its head count, block size or softmax scale.

Most cases do not depend on their head count and block size. The suite replaces these by the nearest
values that the backend declares, so that a kernel for 16 to 128 heads runs nearly all cases. A
kernel with one fixed scale runs every case with that scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.cases import Case
from paged_mla_shared.dims import MlaDims

AnyCase = TypeVar("AnyCase", bound=Case)


def adapt_case(case: AnyCase, capabilities: Capabilities) -> tuple[AnyCase, str]:
    """Return `case` adapted to the backend, and a note about the changes, "" for none.

    Values that the case fixes are not changed.
    """
    declared = {"num_heads": capabilities.num_heads, "block_size": capabilities.block_sizes}
    changes: dict[str, float | None] = {}
    for name, values in declared.items():
        asked = getattr(case, name)
        if asked is None or name in case.fixed:
            continue
        nearest = nearest_of(values, asked)
        if nearest != asked:
            changes[name] = nearest
    if capabilities.softmax_scale not in {None, case.softmax_scale}:
        changes["softmax_scale"] = capabilities.softmax_scale
    before = {name: getattr(case, name) for name in changes}
    notes = [f"{n} {v}, not {before[n]}" for n, v in changes.items() if before[n] is not None]
    if changes:
        case = replace(case, **changes)  # type: ignore[arg-type]  # each is of its field's type
    return case, "; ".join(notes)


def adapt_scenario(scenario: Scenario, capabilities: Capabilities) -> tuple[Scenario, str]:
    """Return a schedule adapted to the backend, and a note about the changes, "" for none.

    If blocks become smaller, their number grows so that the cache holds at least as many tokens.
    The interleaving of ranks is adapted so that it divides the block size.
    """
    config, notes = scenario.config, []
    size = nearest_of(capabilities.block_sizes, config.block_size)
    if size != config.block_size:
        notes.append(f"block_size {size}, not {config.block_size}")
        most = max(config.num_blocks, -(-config.num_blocks * config.block_size // size))
        group = replace(config.group, interleave=math.gcd(config.group.interleave, size))
        adapted = replace(config, block_size=size, num_blocks=most, group=group)
        scenario = replace(scenario, config=adapted)
    heads = scenario.num_heads
    if heads is not None and (nearest := nearest_of(capabilities.num_heads, heads)) != heads:
        notes.append(f"num_heads {nearest}, not {heads}")
        scenario = replace(scenario, num_heads=nearest)
    return scenario, "; ".join(notes)


def adapt_dims(dims: MlaDims, capabilities: Capabilities) -> MlaDims:
    """Return model dims with the nearest head count that the backend declares."""
    return dims.with_heads(nearest_of(capabilities.num_heads, dims.num_heads))


def nearest_of(declared: Collection[int], asked: int) -> int:
    """Return the number in `declared` nearest to `asked`; the larger one if two are as near.

    If `declared` is empty, `asked` is returned.

    >>> nearest_of({16, 32, 64}, 24)
    32
    """
    if asked in declared:
        return asked
    return min(declared, key=lambda value: (abs(value - asked), -value), default=asked)
