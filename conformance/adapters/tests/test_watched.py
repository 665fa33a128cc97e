"""Tests of the project's own kernels between guard zones, with right and wrong kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paged_mla_adapters.surroundings.places import GuardedPlaces
from paged_mla_adapters.surroundings.switch import VARIABLE
from paged_mla_adapters.watched import WatchedBackend
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.backend import CAPABILITIES, create
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases import CASES
from paged_mla_shared.dims import PRESETS

FEW = {
    "create": "layouts-strided-inputs-fp32 or append-strided or gather-strided or layer-strided or "
    "bounded-short-strided-fp32 or queries-strided or prefill-one-query or (test_merge and two)",
    "request_map": "decode-h8-fp32",
    "batch_invariant": "decode-h8-fp32",
    "compiled": "decode-h8-fp32",
}


@pytest.mark.parametrize("mode", FEW)
def test_right_kernels_pass_the_checks(mode: str):
    """All operations of each mode that runs on a CPU pass."""
    backend = f"paged_mla_adapters.watched:{mode}"
    few = ("-k", FEW[mode], "--dtypes", "float32", "--dims", "small")
    done = subprocess.run(
        [sys.executable, "-m", "paged_mla", "conformance", "--backend", backend, *few],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    refused = re.search("Unsupported: (the interpreter of Triton .* with NumPy .*)", done.stdout)
    if refused:
        pytest.skip(refused[1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "PASSED in part" in done.stdout.splitlines()[-1]


class Careless(ForwardingRunner):
    """A runner that writes a byte after its output, and changes an input in ``append``."""

    def __init__(self, problem, inner, places):
        super().__init__(problem, inner)
        self.places = places

    def attend(self, batch):
        """Write a byte after an output buffer."""
        out = self.places.room("the output", (3,), torch.float32)
        everything = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
        everything[out.storage_offset() * 4 + out.nbytes] = 0
        return self.inner.attend(batch)

    def append(self, batch):
        """Write to an input."""
        self.places.input("ckv", torch.from_numpy(batch.ckv)).zero_()
        self.inner.append(batch)


@dataclass(frozen=True)
class CarelessBackend:
    places_of: Callable[[torch.device], Any] | None = None
    name: str = "careless"
    version: str = "0"
    mode: str = "cpu"
    device: str = "CPU"
    memory_bytes: int = 1 << 30
    capabilities: Any = CAPABILITIES

    def prepare(self, problem):
        inner = create().prepare(problem)
        if self.places_of is None:
            return inner
        return Careless(problem, inner, self.places_of(torch.device("cpu")))


def trial_of(case_id: str) -> Trial:
    [case] = [case for case in CASES["decode"] if case.id == case_id]
    return Trial(WatchedBackend(CarelessBackend()), case, PRESETS["small"], "float32")


def test_a_careless_runner_is_found():
    """S-10: the error names the tensor."""
    with pytest.raises(Mismatch, match=r"^\[S-10\] attend: 1 byte written behind the output"):
        trial_of("decode-h8").check_attention()
    with pytest.raises(Mismatch, match=r"^\[S-10\] append: the input ckv was changed in"):
        trial_of("decode-h8").check_append()


def test_surroundings_can_be_turned_off(monkeypatch: pytest.MonkeyPatch):
    """The backend then uses its own allocator."""
    monkeypatch.setenv(VARIABLE, "off")
    trial_of("decode-h8").check_attention()


def test_inputs_whose_elements_share_memory_become_contiguous():
    """All other inputs keep their strides."""
    places = GuardedPlaces(torch.device("cpu"))
    lines = torch.arange(12.0).view(3, 4)[:, :2]
    assert places.input("x", lines).stride() == (4, 1)
    row = torch.arange(4.0).expand(3, 4)
    placed = places.input("x", row)
    assert placed.stride() == (4, 1)
    assert torch.equal(placed, row)
