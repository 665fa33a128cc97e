"""A prefill in the profile ``stale``: only memory that is not read has other numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.runners.profile_adapter import adapted
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_shared.cases import PREFILLS
from paged_mla_shared.dims import SMALL
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Output


@pytest.mark.parametrize("name", ["halves", "empty-causal"])
def test_stale_numbers_are_plain(name: str):
    """S-9: all numbers are finite and small; strides, read numbers and the output stay."""
    shown: list[PrefillBatch] = []

    class Looks(ForwardingRunner):
        def prefill(self, batch: PrefillBatch) -> Output:
            shown.append(batch)
            return self.inner.prefill(batch)

    [case] = [case for case in PREFILLS if case.name == name]
    [batch] = build_prefills(case, SMALL, "float32")
    problem = case.problem(SMALL, "float32")
    profile = replace(load_profile(STRICT), unread="stale")
    answer = adapted(MutantBackend(wrap=Looks), profile).prepare(problem).prefill(batch)
    assert answer.out.tobytes() == MutantBackend().prepare(problem).prefill(batch).out.tobytes()
    for array in ("q_nope", "q_pe", "k_nope", "k_pe", "v"):
        mine, given = getattr(shown[0], array), getattr(batch, array)
        assert mine.strides == given.strides
        assert (np.abs(mine) < 1e4).all()
        read = np.abs(given) < 1e4
        assert (mine[read] == given[read]).all()
