"""Limits of the work of an explanation: a small dump cannot use all memory or run for days."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dumped import changed, dumped

from paged_mla_reference.explain.checks import limits
from paged_mla_reference.explain.command import main
from paged_mla_shared.dump import Dump, save_dump


def long(dump: Dump, columns: int) -> Dump:
    """Return a dump whose first row names its first block again and again."""
    block_size = dump.problem.block_size
    table = np.repeat(dump.arrays["block_table"][:, :1], columns, axis=1)
    lens = dump.arrays["seq_lens"].copy()
    lens[0] = columns * block_size
    found = changed(dump, block_table=table, seq_lens=lens)
    return replace(found, problem=replace(dump.problem, max_model_len=columns * block_size))


@pytest.mark.parametrize("options", [(), ("--token", "0")], ids=["whole", "token"])
def test_a_row_of_more_keys_than_there_is_memory_for(tmp_path: Path, capsys, options):
    """S-9: 5 MB of table, and 22 million keys of one block."""
    path = tmp_path / "long.safetensors"
    dump = long(dumped(), 1_400_000)
    save_dump(dump, path)
    assert path.stat().st_size < 50_000_000
    assert main([str(path), *options]) == 2
    keys = 1_400_000 * dump.problem.block_size
    told = capsys.readouterr().err
    assert f"{path}: seq_lens: got {keys:,} keys in row 0; allowed: at most " in told


@pytest.mark.parametrize("count", [1, 2])
def test_more_pairs_than_there_is_time_for(tmp_path: Path, capsys, monkeypatch, count: int):
    """S-5: of one dump, or of each of several; one token of it can be traced."""
    path = tmp_path / "step.safetensors"
    save_dump(dumped(), path)
    monkeypatch.setattr(limits, "MOST_PRODUCTS", 1000)
    assert main([str(path)] * count) == 2
    told = capsys.readouterr().err
    assert "seq_lens: got " in told
    assert "pairs of a query token and a key; allowed: at most " in told
    assert main([str(path), "--token", "0"]) == 0


def test_a_dump_without_lengths_has_no_limit(tmp_path: Path):
    """S-1: it has too little data to compute an output."""
    path = tmp_path / "step.safetensors"
    save_dump(dumped(without=("seq_lens",)), path)
    assert main([str(path)]) in {0, 1}
