"""Layers that read cached latents launch what the first of them compiled."""

import pytest
import torch
from mla_step import P, R, build
from triton.runtime.jit import JITFunction

from paged_mla_optimized import PagedMla
from paged_mla_optimized.kernels.common.gather import gather_kernel
from paged_mla_optimized.runtime.launch import Launcher
from paged_mla_optimized.tensors.step import MlaStep

KERNEL = JITFunction(gather_kernel.fn, **gather_kernel.kwargs)
SPREAD = {  # what of a step is laid out otherwise, and whether Triton compiles for that
    "ckv": (lambda ckv: torch.zeros(len(ckv), 2 * R)[:, :R], True),
    "k_pe": (lambda k_pe: torch.zeros(len(k_pe), 2 * P)[:, :P], True),
    "cache-token": (lambda cache: torch.cat([cache, cache], dim=2)[..., : R + P], True),
    "cache-block": (lambda cache: torch.cat([cache, cache], dim=1)[:, : cache.shape[1]], True),
    "table-column": (lambda table: torch.stack([table, table], dim=2)[..., 0], True),
    "table-row": (lambda table: torch.cat([table, table], dim=1)[:, : table.shape[1]], False),
    "ckv-length": (lambda ckv: ckv[:50], False),
}


@pytest.fixture
def launches(monkeypatch):
    """Take notes of each launch of the kernel: what is remembered, and the numbers."""
    found, launch = [], Launcher.__call__

    def noting(self, grid, key, *arguments):
        if self._kernel is gather_kernel:
            numbers = [one for one in arguments if isinstance(one, int)]
            found.append((key, dict(zip(number_names(), numbers, strict=True))))
        launch(self, grid, key, *arguments)

    monkeypatch.setattr(Launcher, "__call__", noting)
    return found


def number_names() -> list[str]:
    return [p.name for p in KERNEL.params if not p.is_constexpr and not p.name.endswith("_ptr")]


def compiled_for(numbers: dict[str, int]) -> dict[str, int]:
    """Return the numbers that Triton looks at for the binary that fits."""
    looked_at = {p.name for p in KERNEL.params if not p.do_not_specialize}
    return {name: number for name, number in numbers.items() if name in looked_at}


def gather(changed: str = "") -> None:
    step = build((33, 1), (20, 2))
    tensors = {
        "cache": step.cache,
        "table": step.block_table,
        "ckv": torch.zeros(53, R),
        "k_pe": torch.zeros(53, P),
    }
    if changed:
        name = changed.split("-", maxsplit=1)[0]
        tensors[name] = SPREAD[changed][0](tensors[name])
    tensors["k_pe"] = tensors["k_pe"][: len(tensors["ckv"])]
    mla = PagedMla(step.config, "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, tensors["table"], num_tokens=3))
    mla.gather_context(tensors["cache"], tensors["ckv"], tensors["k_pe"])
    keys = torch.cat(step.keys)[: len(tensors["ckv"])]
    assert torch.equal(torch.cat([tensors["ckv"], tensors["k_pe"]], dim=1), keys)


@pytest.mark.parametrize(("changed", "counts"), [(name, SPREAD[name][1]) for name in SPREAD])
def test_strides_differ_where_triton_specializes(launches, changed, counts):
    """A binary for some strides never starts for others; tables and lengths find it again."""
    gather()
    gather(changed)
    (key, numbers), (other_key, other_numbers) = launches
    assert numbers != other_numbers
    assert (compiled_for(numbers) != compiled_for(other_numbers)) == counts
    assert (key != other_key) == counts


def test_one_launcher_serves_all_layers(launches):
    """S-9: a second cache of the same strides is read by what the first was."""
    step = build((33, 1))
    mla = PagedMla(step.config, "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=1))
    for cache in (step.cache, step.cache.clone()):
        mla.gather_context(cache, torch.zeros(33, R), torch.zeros(33, P))
    assert launches[0] == launches[1]


def test_rows_of_any_address():
    """Where a group of rows begins in a table or in prefix sums is no matter of 16 bytes."""
    aligned = {
        p.name
        for p in KERNEL.params
        if p.name.endswith("_ptr") and not p.do_not_specialize_on_alignment
    }
    assert aligned == {"cache_ptr", "ckv_ptr", "k_pe_ptr"}
