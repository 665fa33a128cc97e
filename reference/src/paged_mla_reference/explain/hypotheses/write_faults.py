"""Find tokens that were written to a wrong slot, to no slot, or in place of other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.faults.kernel.change import appending, writing
from paged_mla_reference.rules.cache import read_slots, slots_to_write
from paged_mla_reference.rules.encoding import as_cached
from paged_mla_reference.rules.rounding import widen
from paged_mla_shared.problem import Batch, Problem

_MOST_TOKENS = 4096


def faults_of_writes(found: Examination) -> Iterator[Hypothesis]:
    """Return hypotheses from the slots in which the latents of the step's tokens are found."""
    step = found.step
    if step.before is None or step.after is None or step.batch is None:
        return
    if step.batch.num_tokens > _MOST_TOKENS or step.problem.layout.format.couples_tokens:
        return
    slots = slots_to_write(step.problem, step.batch)
    landed = _landed(found, slots)
    lost = np.flatnonzero((landed < 0) & (slots >= 0))
    moved = np.flatnonzero((landed >= 0) & (landed != slots))
    if moved.size or lost.size:
        parts = [f"token {t} to slot {landed[t]}, not {slots[t]}" for t in moved[:3].tolist()]
        if moved.size > 3:
            parts.append(f"{moved.size} tokens in wrong slots in all")
        if lost.size:
            more = f" and {lost.size - 1} others" if lost.size > 1 else ""
            parts.append(f"token {lost[0]}{more} to no slot")
        name = f"written: {'; '.join(parts)}"
        yield Hypothesis(
            name, f"{name}.", lambda o: writing(o, lambda _p, _b, _s: landed.copy()), ("S-10",)
        )
    taken = _taken(found, slots)
    others = np.flatnonzero(taken != np.arange(len(taken)))
    if others.size:
        token = int(others[0])
        name = f"{others.size} slots hold another token: slot of {token} holds {taken[token]}"

        def swapped(_: Problem, batch: Batch) -> Batch:
            return replace(batch, ckv=batch.ckv[taken], k_pe=batch.k_pe[taken])

        yield Hypothesis(name, f"{name}.", lambda o: appending(o, swapped), ("S-10",))


def _latents(found: Examination) -> NDArray[np.float64]:
    """Return the step's latents as they are read from the cache, [T, R]."""
    batch = found.step.batch
    assert batch is not None
    return widen(as_cached(found.step.problem.layout, batch.ckv, batch.k_pe)[0])


def _landed(found: Examination, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the slot that now holds each token's latent, -1 if no slot does.

    This is the token's own slot if that holds the latent, otherwise a slot that the step changed.
    """
    step, size = found.step, found.step.problem.block_size
    assert step.before is not None
    assert step.after is not None
    ids = step.after.block_ids
    raw = step.after.layout.rows(step.after.blocks), step.after.layout.rows(step.before.read(ids))
    block, index = np.nonzero((raw[0] != raw[1]).any(axis=2))
    changed = ids[block] * size + index
    held = {widen(x).tobytes(): int(s) for s, x in _read(found, changed)}
    still = dict(_read(found, slots[slots >= 0]))
    landed = np.full_like(slots, -1)
    for token, latent in enumerate(_latents(found)):
        own = int(slots[token])
        if own >= 0 and latent.tobytes() == widen(still[own]).tobytes():
            landed[token] = own
        else:
            landed[token] = held.get(latent.tobytes(), -1)
    return landed


def _read(found: Examination, slots: NDArray[np.int64]) -> list[tuple[int, NDArray[np.float64]]]:
    """Return each slot with the latent that it has after the step."""
    assert found.step.after is not None
    ckv, _ = read_slots(found.step.after, slots)
    return list(zip(slots.tolist(), widen(ckv), strict=True))


def _taken(found: Examination, slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token whose latent is in each token's slot; the token itself if no token's is."""
    taken = np.arange(len(slots))
    latents = {latent.tobytes(): token for token, latent in enumerate(_latents(found))}
    written = np.flatnonzero(slots >= 0)
    for token, (_, latent) in zip(written.tolist(), _read(found, slots[written]), strict=True):
        taken[token] = latents.get(latent.tobytes(), token)
    return taken
