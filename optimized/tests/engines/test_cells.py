"""Cells that engines time, and their table; the engines are made up here."""

from __future__ import annotations

import json
import math
import sys
from threading import Event

import pytest

from paged_mla_optimized.engines.tools import attention, cells
from paged_mla_optimized.engines.tools.cells import Command
from paged_mla_optimized.engines.tools.rates import interval_of_median
from paged_mla_optimized.engines.tools.side_by_side import Cell

COMMAND = Command(
    engine="vllm",
    tool="rate",
    step="step",
    ours="OURS",
    peers=("A", "B"),
    rows=(1, 8),
    contexts=(16, 64),
    rounds=2,
    repeats=3,
    switches=("ENGINE_IS_SLOW", "ENGINE_IS_FAST"),
)
FACTS = {
    "device": "GPU",
    "torch": "2",
    "triton": "3",
    "commit": "abc",
    "date": "2026-01-01",
}


class Timer:
    """A step takes 1 ms a row; there is no room for 8x64."""

    def seconds(self, cell):
        return math.inf if cell == Cell(8, 64) else 0.0

    def step_ms(self, cell, repeats):
        return [float(cell.rows)] * repeats

    def busy_ms(self, cell):
        return 0.5 * cell.rows


@pytest.fixture
def main(monkeypatch, tmp_path):
    monkeypatch.setattr(cells, "build_apart", lambda *_: tmp_path)
    monkeypatch.setattr(cells, "record_apart", lambda: FACTS)
    monkeypatch.setattr(cells, "version", lambda _: "0")
    monkeypatch.setenv("ENGINE_IS_SLOW", "1")

    def main(run, *arguments):
        monkeypatch.setattr(sys, "argv", ["rate", "--folder", str(tmp_path), *arguments])
        return COMMAND.main("Time.", run)

    return main


def test_every_backend_times_the_cells_that_fit(main, tmp_path, capsys):
    order = []

    def run(_model, backend, _options, use):
        order.append(backend)
        if backend == "A":
            raise ImportError("no A")
        use(Timer())

    assert main(run, "--heads", "128", "--layers", "2") == 1  # for A
    assert order == ["OURS", "A", "B", "A", "B", "OURS"]  # none is always the first
    said = capsys.readouterr().out
    assert "no A" in said
    assert "OURS 8x64 ms: skipped" in said
    names = ["128-A.json", "128-B.json", "128-OURS.json"]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == names
    assert json.loads((tmp_path / "128-A.json").read_text())["cells"] == {}
    found = json.loads((tmp_path / "128-OURS.json").read_text())
    assert list(found["cells"]) == ["8x16", "1x64", "1x16"]  # most keys first
    assert found["cells"]["8x16"] == {"ms": [8.0] * 6, "busy_ms": [4.0]}  # of both rounds
    facts = found["facts"]
    assert (facts["engine"], facts["heads"], facts["layers"]) == ("vllm 0", 128, 2)
    assert facts["commit"] == "abc"
    module = "paged_mla_optimized.engines.vllm.tools.rate"
    assert facts["command"].startswith(f"ENGINE_IS_SLOW=1 python -m {module} --folder")


def test_the_process_that_forks_engines_does_no_other_work(main, monkeypatch, tmp_path):
    """A GPU that was met, and threads that computed: both are met in ``asked_apart`` alone."""
    asked = []

    def run(*given):
        assert cells.free_bytes() == 7
        assert cells.most_cache_bytes(given[2]) == 4
        asked.append(given[0])

    def asked_apart(code):
        asked.append(code)
        compile(code, "", "exec")
        return "7" if "mem_get_info" in code else str(tmp_path / "model")

    monkeypatch.undo()
    monkeypatch.setattr(cells, "asked_apart", asked_apart)
    monkeypatch.setattr(cells, "record_apart", lambda: FACTS)
    monkeypatch.setattr(cells, "version", lambda _: "0")
    cells.free_bytes.cache_clear()
    main(run, "--backends", "A", "--rounds", "1")
    cells.free_bytes.cache_clear()
    assert "heads=16, layers=8" in asked[0]
    assert asked[-1] == tmp_path / "model"


def test_the_last_engine_of_a_backend_is_profiled_when_all_is_timed(main):
    asked = []

    class Told(Timer):
        def step_ms(self, cell, repeats):
            asked.append(str(cell))
            return super().step_ms(cell, repeats)

        def busy_ms(self, cell):
            asked.append(f"{cell} busy")
            return super().busy_ms(cell)

    main(lambda *given: given[-1](Told()), "--backends", "A")
    cells = ["8x16", "1x64", "1x16"]
    assert asked == [*cells, *cells, "1x16 busy", "1x64 busy", "8x16 busy"]


def test_a_profiler_that_fails_keeps_the_times(main, tmp_path, capsys):
    class Fails(Timer):
        def busy_ms(self, _cell):
            raise RuntimeError("no trace")

    main(lambda *given: given[-1](Fails()), "--backends", "A", "B", "--rounds", "1")
    for name in ("A", "B"):
        found = json.loads((tmp_path / f"16-{name}.json").read_text())["cells"]
        assert found["8x16"] == {"ms": [8.0] * 3}
    assert capsys.readouterr().out.count("RuntimeError: no trace") == 2


def test_an_engine_that_hangs_is_given_up(main, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cells, "_PATIENCE", 0.05)

    class Dead(Timer):
        def step_ms(self, _cell, _repeats):
            Event().wait(60)

    status = main(
        lambda *given: given[-1](Dead() if given[1] == "A" else Timer()),
        *("--backends", "A", "B", "--rounds", "1"),
    )
    assert status == 1
    found = {path.name: json.loads(path.read_text())["cells"] for path in tmp_path.glob("*.json")}
    assert found.keys() == {"16-A.json", "16-B.json"}
    assert found["16-A.json"] == {}
    assert found["16-B.json"]
    assert "TimeoutError: not done after" in capsys.readouterr().out


def test_engines_share_the_time_that_is_left_once_they_are_made(main, monkeypatch):
    clock, begun = [0.0], []
    monkeypatch.setattr(cells.time, "monotonic", lambda: clock[0])

    class Slow(Timer):
        def step_ms(self, cell, repeats):
            clock[0] += 8.0
            begun.append(str(cell))
            return super().step_ms(cell, repeats)

    def run(_model, backend, _options, use):
        clock[0] += 30.0 if backend == "OURS" else 0.0  # all that comes first
        use(Slow())

    main(run, "--seconds", "90", "--rounds", "1")
    most_keys_first = ["8x16", "1x64", "1x16"]  # begun 30, 38 and 46 s after all, of 50
    assert begun == most_keys_first * 2 + most_keys_first[:2]


def test_a_cell_for_which_no_time_is_left_is_not_begun(main, monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(cells.time, "monotonic", lambda: clock[0])

    class Slow(Timer):
        def step_ms(self, cell, repeats):
            clock[0] += 40.0
            return super().step_ms(cell, repeats)

    main(lambda *given: given[-1](Slow()), "--seconds", "50", "--backends", "OURS", "--rounds", "1")
    found = json.loads((tmp_path / "16-OURS.json").read_text())
    assert list(found["cells"]) == ["8x16", "1x64"]


def test_a_table_has_ratios_and_the_part_of_attention(main, tmp_path, capsys):
    facts = FACTS | {"engine": "vllm 0", "layers": 8, "command": "python -m rate"}
    for name, times in (
        ("OURS", {"1x1024": ([2.0, 1.0, 4.0], [0.5]), "8x1024": ([4.0], [2.0]), "1x16": ([1.0],)}),
        ("A", {"1x1024": ([3.0, 3.0, 3.0], [0.6]), "8x1024": ([5.0],)}),
        ("B", {"1x1024": ([9.0], [0.4])}),
        ("attention", {"1x1024": ([0.5],), "8x1024": ([2.4],)}),
    ):
        found = {
            cell: dict(zip(("ms", "busy_ms"), of_cell, strict=False))
            for cell, of_cell in times.items()
        }
        path = tmp_path / f"128-{name}.json"
        path.write_text(json.dumps({"facts": facts, "cells": found}))
    assert main(None, "--table") == 0
    said = capsys.readouterr().out
    assert "vllm 0, GPU, torch 2, triton 3, commit abc, 2026-01-01, 8 layers.\n" in said
    assert said.count("python -m rate") == 1
    assert "| OURS | A | B | best other / OURS: medians | best other / OURS: leasts |" in said
    assert (
        "| 1x1024 | 2.000 (1.000 to 4.000), busy 0.500 | 3.000 (3.000 to 3.000), busy 0.600 "
        "| 9.000 (9.000 to 9.000), busy 0.400 | 1.500 | 3.000 | 0.800 |  | 25% |" in said
    )
    assert "| 4.000 (4.000 to 4.000), busy 2.000 | 5.000 (5.000 to 5.000) |  | 1.250 |" in said
    assert "| 1x16 | 1.000 (1.000 to 1.000) |  |  |  |  |  |  |  |" in said
    assert "ms per step: median" in said
    assert "Ratios, of medians: geometric mean 1.369, least 1.250 of 2." in said
    assert "Ratios, of busy: geometric mean 0.800, least 0.800 of 1." in said
    assert "half of the step, of leasts: geometric mean 1.250, least 1.250 of 1." in said


def test_an_empty_table_is_an_error(main, tmp_path, capsys):
    """Nor is a folder made of a name that was mistyped."""
    for folder in (tmp_path, tmp_path / "no-such"):
        with pytest.raises(SystemExit) as caught:
            main(None, "--table", "--folder", str(folder))
        assert caught.value.code == 2
        assert f"--folder: got {folder}; allowed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("count", "ends"),
    [(5, None), (6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (12, (2, 9)), (20, (5, 14))],
)
def test_an_interval_holds_the_median_19_times_in_20(count, ends):
    """Ends by rank, as tables of the sign test have them."""
    assert interval_of_median([float(n) for n in reversed(range(count))]) == ends


def test_engines_together_are_compared_turn_by_turn(main, tmp_path, capsys):
    """A host that is slow in one turn is so for all; of others the fastest counts."""
    ours = [1.0, 4.0, 2.0, 1.0, 1.0, 2.0]
    for name, factor, together in (
        ("OURS", 1.0, True),
        ("A", 1.5, True),
        ("B", 1.2, True),
        ("C", 0.5, False),
    ):
        facts = FACTS | {"engine": "vllm 0", "layers": 8, "command": name, "together": together}
        times = [factor * ms for ms in ours]
        times[0] *= 1.0 if name == "OURS" else 2.0
        cells_of_it = {"1x16": {"ms": times}, "8x16": {"ms": times[:5]}}
        path = tmp_path / f"16-{name}.json"
        path.write_text(json.dumps({"facts": facts, "cells": cells_of_it}))
    assert main(None, "--table") == 0
    said = capsys.readouterr().out
    assert "| best other / OURS: turns | attention's part |" in said
    assert "| 1.200 (1.200 to 2.400) |  |" in said
    assert "geometric mean 1.200, least 1.200, least upper end 2.400 of 1." in said


def test_windows_of_one_turn_are_no_turns_of_their_own(main, tmp_path, capsys):
    """Six turns of two windows: the interval is that of six."""
    facts = FACTS | {"engine": "vllm 0", "layers": 8, "together": True, "repeats": 2}
    for name, factors in (("OURS", [1.0] * 12), ("A", [3.0, 1.0, *[1.25] * 8, 0.5, 1.5])):
        found = {"facts": facts | {"command": name}, "cells": {"1x16": {"ms": factors}}}
        (tmp_path / f"16-{name}.json").write_text(json.dumps(found))
    assert main(None, "--table") == 0
    assert "| 1.250 (1.000 to 2.000) |" in capsys.readouterr().out


def test_attention_is_timed_at_the_cells_of_an_engine(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "device_record", dict)
    monkeypatch.setattr(attention, "_milliseconds", lambda heads, rows, _: heads * rows / 1e3)
    monkeypatch.setattr(sys, "argv", ["attention", str(tmp_path), "--heads", "16"])
    with pytest.raises(SystemExit):
        attention.main()
    for name, timed in (("OURS", ["8x64", "1x64"]), ("A", ["8x64"])):
        found = {"facts": {"layers": 4}, "cells": {cell: {"ms": [1.0]} for cell in timed}}
        (tmp_path / f"16-{name}.json").write_text(json.dumps(found))
    for _ in range(2):  # what it wrote is no engine's
        assert attention.main() == 0
    found = json.loads((tmp_path / "16-attention.json").read_text())["cells"]
    assert found == {"8x64": {"ms": [0.512]}, "1x64": {"ms": [0.064]}}


def test_a_backend_whose_name_ends_with_attention_has_cells(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "device_record", dict)
    monkeypatch.setattr(attention, "_milliseconds", lambda *_: 1.0)
    monkeypatch.setattr(sys, "argv", ["attention", str(tmp_path), "--heads", "16"])
    found = {"facts": {"layers": 4}, "cells": {"8x64": {"ms": [1.0]}}}
    (tmp_path / "16-flashattention.json").write_text(json.dumps(found))
    assert attention.main() == 0
    assert list(json.loads((tmp_path / "16-attention.json").read_text())["cells"]) == ["8x64"]


def test_cells_of_several_numbers_of_layers_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["attention", str(tmp_path), "--heads", "16"])
    for name, layers in (("OURS", 61), ("A", 4)):
        found = {"facts": {"layers": layers}, "cells": {"8x64": {"ms": [1.0]}}}
        (tmp_path / f"16-{name}.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):
        attention.main()
    assert "layers: got 4, 61 in" in capsys.readouterr().err


def test_engines_that_live_together_take_turns_in_each_cell(main, tmp_path):
    alive, order = [], []

    class Told(Timer):
        def __init__(self, name):
            self.name = name

        def step_ms(self, cell, repeats):
            assert alive == ["OURS", "A", "B"]
            order.append((str(cell), self.name))
            return super().step_ms(cell, repeats)

        def busy_ms(self, cell):
            order.append((f"{cell} busy", self.name))
            return super().busy_ms(cell)

    def run(_model, backend, options, use):
        assert options.at_once == 3  # share the memory
        alive.append(backend)
        use(Told(backend))
        alive.remove(backend)

    assert main(run, "--together", "--rows", "1", "--repeats", "1") == 0
    first, second = ["OURS", "A", "B"], ["A", "B", "OURS"]
    assert order == [
        *[(cell, name) for cell in ("1x64", "1x16") for name in first + second],
        *[(f"{cell} busy", name) for name in first for cell in ("1x16", "1x64")],
    ]
    assert not alive
    found = json.loads((tmp_path / "16-B.json").read_text())["cells"]
    assert found["1x16"] == {"ms": [1.0, 1.0], "busy_ms": [0.5]}


def test_of_engines_together_those_that_fail_leave_the_others(main, tmp_path, capsys):
    made = []

    class Dies(Timer):
        def step_ms(self, cell, repeats):
            if cell == Cell(1, 16):
                raise RuntimeError("gone")
            return super().step_ms(cell, repeats)

    def run(_model, backend, _options, use):
        made.append(backend)
        if backend == "OURS":
            raise ImportError("never made")
        use(Dies() if backend == "A" else Timer())
        if backend == "A":
            raise RuntimeError("ended badly")

    assert main(run, "--together", "--rows", "1", "--repeats", "1") == 1
    assert made == ["OURS", "A", "B"]  # once each
    said = capsys.readouterr().out
    assert said.count("RuntimeError: gone") == 1
    assert said.count("ImportError: never made") == 1
    cells = {name: json.loads((tmp_path / f"16-{name}.json").read_text())["cells"] for name in "AB"}
    assert cells["A"] == {"1x64": {"ms": [1.0, 1.0]}}
    assert cells["B"]["1x16"] == {"ms": [1.0, 1.0], "busy_ms": [0.5]}


def test_a_backend_whose_engine_was_not_made_is_named(main, capsys):
    def run(_model, backend, _options, use):
        if backend == "B":
            raise MemoryError("no room")
        use(Timer())

    assert main(run, "--together") == 1
    assert main(run, "--table") == 0
    said = capsys.readouterr().out
    assert "| 16 heads: rows x context | OURS | A | B |" in said
    assert "Requested, but not timed: B." in said


def test_no_engine_together_is_an_error(main, tmp_path):
    def run(*_):
        raise ImportError("none")

    assert main(run, "--together") == 1
    assert [json.loads(path.read_text())["cells"] for path in tmp_path.glob("*.json")] == [{}] * 3
