"""The tensors that the Gluon prefill serves; tests on a GPU check that its outputs are correct."""

import weakref

import pytest
import torch

from paged_mla_optimized.api import prefill as api
from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.prefill import hopper as launchers
from paged_mla_optimized.operations.prefill.hopper import HopperPrefill, heads_fit
from paged_mla_optimized.operations.prefill.portable import Heads, PortablePrefill
from paged_mla_optimized.planning.prefill import (
    HOPPER_DIMS,
    is_for_hopper,
    prefill_variant,
)
from paged_mla_optimized.runtime.device import DeviceFacts

CONFIG = PrefillConfig(num_heads=4, softmax_scale=0.5, max_rows=8, max_tokens=64)


def lines(count: int, heads: int, width: int, *, stride: int = 0, offset: int = 0) -> torch.Tensor:
    """Return [count, heads, width] with `stride` elements a line, `offset` into its storage."""
    stride = stride or heads * width
    storage = torch.zeros(count * stride + offset, dtype=torch.bfloat16)
    return storage[offset:].as_strided((count, heads, width), (stride, width, 1))


def heads_of(**changes: torch.Tensor) -> Heads:
    """Return dense tensors of 6 queries and 9 keys."""
    dense = Heads(
        lines(6, 4, 128), lines(6, 4, 64), lines(9, 4, 128), lines(9, 1, 64)[:, 0], lines(9, 4, 128)
    )
    return dense._replace(**changes)


PROJECTED = lines(9, 4, 256)
NO_KEYS = Heads(*(t if i < 2 else t[:0] for i, t in enumerate(heads_of())))


@pytest.mark.parametrize(
    ("heads", "fits"),
    [
        (heads_of(), True),
        (heads_of(k_nope=PROJECTED[..., :128], v=PROJECTED[..., 128:]), True),
        (heads_of(q_nope=lines(6, 4, 192)[..., :128]), True),
        (heads_of(v=lines(9, 4, 128, stride=516)), False),
        (heads_of(k_pe=lines(9, 1, 64, stride=65)[:, 0]), False),
        (heads_of(q_pe=lines(6, 4, 64, offset=4)), False),
        (heads_of(k_nope=lines(1, 4, 128).expand(9, 4, 128)), False),
        (NO_KEYS, False),
    ],
    ids=[
        "dense", "halves", "one-tensor", "stride", "rope-stride", "address", "expanded", "no-keys"
    ],
)  # fmt: skip
def test_lines_must_be_aligned_to_16_bytes(monkeypatch, heads, fits):
    """Other tensors are left to the portable kernel, which takes its tiles from the same plan."""
    assert heads_fit(heads) is fits
    launched = []
    for kind in (HopperPrefill, PortablePrefill):
        monkeypatch.setattr(kind, "launch", lambda self, *_, **__: launched.append(type(self)))
    monkeypatch.setattr(api, "device_facts", lambda _device: DeviceFacts("sm90", 132))
    prefill = Prefill(CONFIG, "cpu")
    monkeypatch.setattr(prefill._plan, "num_tokens", 6)
    prefill.attend(*heads)
    assert launched == [HopperPrefill if fits else PortablePrefill]


@pytest.mark.parametrize(
    ("arch", "dtype", "dims", "serves"),
    [
        ("sm90", "bfloat16", HOPPER_DIMS, True),
        ("sm90", "float16", HOPPER_DIMS, True),
        ("sm90", "float32", HOPPER_DIMS, False),
        ("sm90", "bfloat16", (192, 64, 256), False),
        ("sm80", "bfloat16", HOPPER_DIMS, False),
    ],
)
def test_who_serves(arch, dtype, dims, serves):
    """The Gluon kernel is made for one size of heads, in 16 bits, on Hopper."""
    assert is_for_hopper(arch, dtype, dims) is serves
    if serves:
        assert prefill_variant(arch, dtype, dims).tile_m == 128  # 64 for each of two warpgroups


def test_descriptors_cover_every_head():
    """Lines hold all heads, from the first column of the first; a half ends before its line."""
    heads = heads_of(k_nope=PROJECTED[..., :128], v=PROJECTED[..., 128:])
    described = HopperPrefill(CONFIG, 132).describe(heads)
    q_nope, q_pe, k_nope, k_pe, v = described.descriptors
    assert [d.shape for d in (q_nope, q_pe, k_pe)] == [[6, 512], [6, 256], [9, 64]]
    for half, tensor in ((k_nope, heads.k_nope), (v, heads.v)):
        assert half.base.data_ptr() == tensor.data_ptr()
        assert half.shape == [9, 3 * 256 + 128]
        assert half.strides == [1024, 1]


def test_descriptors_are_kept_without_tensors(monkeypatch):
    """One set for each layer's addresses and strides, forgotten together; no tensor stays alive."""
    monkeypatch.setattr(launchers, "MAX_LAYERS", 2)
    prefill = HopperPrefill(CONFIG, 132)
    heads = heads_of()
    first = prefill.describe(heads)
    assert prefill.describe(heads) is first
    others = [heads._replace(v=lines(9, 4, 128)), heads._replace(v=PROJECTED[..., 128:])]
    assert prefill.describe(others[0]) is not first
    assert prefill.describe(heads) is first
    assert prefill.describe(others[1]) is not None
    assert prefill.describe(heads) is not first
    gone = weakref.ref(heads.v)
    del heads
    assert gone() is None
