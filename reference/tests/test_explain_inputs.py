"""Reports about a step's inputs: inputs that are parts of larger tensors, and written inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dumped import case, changed, dumped

from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.explain.explanation import Explanation, explain
from paged_mla_reference.explain.render.maps import maps_of
from paged_mla_reference.faults import CATALOGUE
from paged_mla_reference.oracle import RIGHT
from paged_mla_shared.cases import Row
from paged_mla_shared.dump import Dump, load_dump, save_dump
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Rope, RopePairing


def appended(dump: Dump, name: str) -> tuple[Dump, CacheImage]:
    """Return a dump and what a fault's append makes of its cache."""
    step = Step.of(dump)
    assert step.batch is not None
    assert step.before is not None
    return dump, CATALOGUE[name].change(RIGHT).append(step.problem, step.batch, step.before)


def named(found: Explanation) -> list[str]:
    return [fit.hypothesis.name for fit in found.best]


def test_latents_that_are_columns_of_one_projection(tmp_path: Path):
    """S-10: a writer that takes them for dense is named, from a file."""
    dump = dumped(without=("out", "lse"))
    ckv, k_pe = dump.arrays["ckv"], dump.arrays["k_pe"]
    fused = np.hstack([ckv, k_pe, ckv])
    rank = ckv.shape[1]
    dump = changed(dump, ckv=fused[:, :rank], k_pe=fused[:, rank : rank + k_pe.shape[1]])
    assert not explain(dump).is_broken
    dump, after = appended(dump, "latents-are-taken-for-dense")
    rows = after.read(dump.arrays["block_ids"]).view(np.float32)
    cache = rows.reshape(dump.arrays["cache_after"].shape)
    save_dump(changed(dump, cache_after=cache), tmp_path / "x.safetensors")
    found = explain(load_dump(tmp_path / "x.safetensors"))
    assert found.found.first is not None
    assert found.found.first.rule == "S-10"
    assert named(found) == ["latents-are-taken-for-dense"]


def test_an_append_that_writes_its_inputs():
    """S-10: inputs are left as they were."""
    dump = dumped()
    left = {f"{name}_left": dump.arrays[name].copy() for name in ("ckv", "k_pe")}
    assert explain(changed(dump, **left)).verdict == "No rule is broken."
    left["k_pe_left"][:1] = 0
    found = explain(changed(dump, **left))
    assert found.found.first is not None
    assert (found.found.first.rule, found.found.first.at) == ("S-10", (0, 0))
    assert named(found) == ["append-writes-its-inputs"]
    written = sum(array.size for array in left.values())
    assert found.best[0].residual.of == dump.arrays["cache_after"].nbytes + written


@pytest.mark.parametrize("rope", [None, Rope(RopePairing.NEOX)])
@pytest.mark.parametrize("rows", [(Row(0, 0), Row(0, 0)), ()])
@pytest.mark.parametrize("cache_format", ["fp32", "fp8_block_token", "fp8_ds_mla"])
def test_an_idle_step(cache_format: str, rows: tuple[Row, ...], rope: Rope | None):
    """S-2, S-6: rows that are padding have no block, and a step may have no rows."""
    idle = dumped(of=case(rows=rows, cache_format=cache_format, rope=rope))
    none = {name: idle.arrays[name][:0] for name in idle.arrays if name.startswith(("cache", "sc"))}
    found = explain(changed(idle, block_ids=idle.arrays["block_ids"][:0], **none))
    maps_of(found.found)
    assert found.verdict.startswith("No rule is broken")
