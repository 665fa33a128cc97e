"""Tests of ``ci.flashmla`` on a checkout with a short test."""

import argparse
import json
import multiprocessing
import sys
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from ci import flashmla, flashmla_cases
from ci.flashmla_cases import Case, bytes_of, collect, load, ordered, run
from paged_mla_optimized.drop_in import flash_mla

SOURCE = '''
import dataclasses, torch, flash_mla

@dataclasses.dataclass
class TestParam:
    b: int
    s_q: int
    s_k: int
    is_varlen: bool
    is_causal: bool
    test_performance: bool = True
    h_q: int = 128
    h_kv: int = 1
    d: int = 576
    dv: int = 512

def test_flash_mla(t):
    print("-------------------------------")
    print(f"Running on {t}...")
    assert not t.test_performance
    if t.s_k == 140:
        print("`out` mismatch")
        raise AssertionError
    if (t.s_k, t.s_q, t.h_q) == (4096, 2, 16) and torch.get_default_dtype() == torch.float16:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

def main(torch_dtype):
    torch.set_default_dtype(torch_dtype)
    for s_k in [20, 140, 4096]:
        for s_q in [1, 2]:
            for h_q in [16, 128]:
                for is_causal in [False, True]:
                    test_flash_mla(TestParam(1, s_q, s_k, False, is_causal, h_q=h_q))
'''  # fmt: skip


@pytest.fixture(name="checkout")
def _checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("flash_mla", flashmla_cases.TEST.stem):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(flashmla_cases, "time", SimpleNamespace(sleep=lambda _: None))
    path = tmp_path / flashmla_cases.TEST
    path.parent.mkdir()
    path.write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("flash_mla", None)
    sys.modules.pop(flashmla_cases.TEST.stem, None)


def options(checkout, **changes):
    every = {"checkout": checkout, "dtype": ["bf16", "fp16"]}
    return argparse.Namespace(**(every | changes))


def test_cases_of_main_are_collected_in_both_dtypes_and_not_run(checkout):
    test = load(checkout)
    assert test.flash_mla is flash_mla
    run_before = test.test_flash_mla
    cases = collect(test)
    assert [case.dtype for case in cases] == ["bf16"] * 24 + ["fp16"] * 24
    assert not any(case.param.test_performance for case in cases)
    assert test.test_flash_mla is run_before
    assert torch.get_default_dtype() == torch.float32


def test_each_kernel_is_compiled_by_one_case_before_all_others(checkout):
    """With one query token, which sees every key, both masks use the same kernel."""
    cases = collect(load(checkout))
    in_order = ordered(cases)
    first = in_order[:12]  # six kernels in two dtypes
    assert [case.param.s_k for case in first] == [20] * len(first)
    kernels = {
        (c.dtype, c.param.h_q, c.param.s_q, c.param.s_q > 1 and c.param.is_causal) for c in first
    }
    assert len(kernels) == len(first)
    assert sorted(map(str, in_order)) == sorted(map(str, cases))
    assert ordered(collect(load(checkout))) == in_order  # the order of another process


def test_one_dtype_can_be_left_out(checkout):
    part = flashmla.chosen(collect(load(checkout)), options(checkout, dtype=["fp16"]))
    assert [case.dtype for case in part] == ["fp16"] * 24


def test_a_failure_has_the_output_of_the_test(checkout):
    test = load(checkout)
    passes, fails = [c for c in collect(test) if c.param.s_k < 4096][7:9]
    assert run(test, passes) == ""
    assert run(test, fails) == "AssertionError: \n`out` mismatch"
    assert torch.get_default_dtype() == torch.float32


def test_a_case_without_enough_memory_is_tried_again(checkout, monkeypatch):
    test = load(checkout)
    [case, *_] = [
        c for c in collect(test) if c.dtype == "fp16" and c.param.s_k == 4096 and c.param.s_q == 2
    ]
    assert run(test, case) == "OutOfMemoryError: tried to allocate 7 GiB"
    short = iter([torch.OutOfMemoryError("1 GiB"), torch.OutOfMemoryError("1 GiB")])

    def sometimes(_):
        if error := next(short, None):
            raise error

    monkeypatch.setattr(test, "test_flash_mla", sometimes)
    assert run(test, case) == ""


def test_the_memory_of_a_case_grows_with_its_tensors(checkout):
    param = collect(load(checkout))[0].param

    def size(**changes):
        return bytes_of(Case("bf16", type(param)(**(vars(param) | changes))))

    assert size(b=128, s_k=32768, is_varlen=True) > 128 * 32768 * 576 * 2 * 2
    assert size(h_kv=2, h_q=128, s_k=4096) > 128 * 4096 * 576 * 4
    assert size() < flashmla._SMALL


def test_large_cases_wait_for_memory_and_small_ones_do_not():
    memory = flashmla.Memory(multiprocessing.get_context("spawn"), 3 << 30)
    order = []

    def second():
        with memory.take(2 << 30):
            order.append("second")

    with memory.take(2 << 30):
        thread = Thread(target=second)
        thread.start()
        with memory.take(1):
            order.append("small")
        thread.join(0.1)
        order.append("first ends")
    thread.join()
    assert order == ["small", "first ends", "second"]
    with memory.take(1 << 40):  # more than the total, so no other case runs
        pass


def test_a_lost_device_releases_its_reserved_memory(monkeypatch):
    def lost():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    memory = flashmla.Memory(multiprocessing.get_context("spawn"), 3 << 30)
    for _ in range(2):
        with memory.take(2 << 30):
            pass


def test_a_process_ends_once_its_device_is_lost(checkout, monkeypatch):
    monkeypatch.setattr(flashmla, "is_lost", lambda: True)
    ended = lines_of(checkout)
    assert [bool(line["message"]) for line in ended[-2:]] == [False, True]
    assert len(ended) < 48


def lines_of(checkout, **changes):
    context = multiprocessing.get_context("spawn")
    begun, memory = context.Value("q", 0), flashmla.Memory(context, 1 << 40)
    results = checkout / "results"
    flashmla.work(options(checkout, **changes), results, begun, memory)
    return flashmla.last_lines(results)


def test_counts_have_failed_cases_and_cases_that_did_not_run(checkout, capsys):
    cases = collect(load(checkout))
    ended = lines_of(checkout)
    counts = flashmla.counts_of(cases, ended)
    assert counts["bf16"] == {"collected": 24, "passed": 16, "failed": 8, "not run": 0}
    assert counts["fp16"] == {"collected": 24, "passed": 14, "failed": 10, "not run": 0}
    assert not flashmla.show(counts, ended)
    said = capsys.readouterr().out
    assert "bf16: 24 collected, 16 passed, 8 failed, 0 not run" in said
    assert "`out` mismatch" in said
    assert "and 8 more failures" in said


def test_a_case_that_never_ends_is_a_failure(checkout, monkeypatch):
    def crash(_test, case):
        if case.param.s_k == 140:
            raise SystemExit
        return ""

    monkeypatch.setattr(flashmla, "run", crash)
    with pytest.raises(SystemExit):
        lines_of(checkout)
    results = checkout / "results"
    results.write_text(
        results.read_text() + '{"dtype": "bf'
    )  # the process stopped during the write
    *passed, last = flashmla.last_lines(results)
    assert "s_k=140" in last["case"]
    assert "did not end" in last["message"]
    assert not any(line["message"] for line in passed)


def test_only_all_cases_of_both_dtypes_are_a_success(checkout):
    cases = [case for case in collect(load(checkout)) if case.param.s_k == 20]
    passed = [{"dtype": case.dtype, "case": str(case), "message": ""} for case in cases]
    assert flashmla.show(flashmla.counts_of(cases, passed), passed)
    assert not flashmla.show(flashmla.counts_of(cases, passed[1:]), passed[1:])
    of_one = [line for line in passed if line["dtype"] == "bf16"]
    assert not flashmla.show(flashmla.counts_of(cases, of_one), of_one)
    assert not flashmla.show(flashmla.counts_of([], []), [])


def test_a_path_without_the_test_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        flashmla.main([str(tmp_path)])
    assert f"PATH: got {tmp_path}, which has no tests/" in capsys.readouterr().err


def test_a_report_path_of_a_folder_is_an_error_before_cases_run(checkout, capsys):
    with pytest.raises(SystemExit, match="2"):
        flashmla.main([str(checkout), "--report", str(checkout)])
    assert f"--report: got {checkout}; allowed: a file" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["", "import no_such_module", "def main(torch_dtype): ..."])
def test_the_test_of_another_commit_is_an_error(checkout, capsys, monkeypatch, source):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (checkout / flashmla_cases.TEST).write_text(source)
    with pytest.raises(SystemExit, match="2"):
        flashmla.main([str(checkout)])
    assert f"PATH: got {checkout}, whose tests/" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--workers=0", "--dtype=fp8", "--seconds=x"])
def test_invalid_options_are_an_error(option, checkout, capsys):
    with pytest.raises(SystemExit, match="2"):
        flashmla.main([str(checkout), option])
    assert option.split("=")[0] in capsys.readouterr().err


def test_processes_run_the_cases_and_a_report_has_counts_failures_and_versions(
    checkout, capfd, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    report = checkout / "report.json"
    arguments = [str(checkout), "--workers=1", "--dtype=bf16", "--report", str(report)]
    assert flashmla.main([*arguments, "--commit=9241ae3"]) == 1
    assert "bf16: 24 collected, 16 passed, 8 failed, 0 not run" in capfd.readouterr().out
    document = json.loads(report.read_text())
    assert document["counts"]["fp16"] == {
        "collected": 24, "passed": 0, "failed": 0, "not run": 24,
    }  # fmt: skip
    assert len(document["failures"]) == 8
    assert document["flashmla"] == "9241ae3"
    assert document["torch"] == torch.__version__


def test_without_a_gpu_no_case_runs(checkout, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert flashmla.main([str(checkout)]) == flashmla.CANNOT_RUN_HERE
    assert "needs a Hopper GPU" in capsys.readouterr().out
