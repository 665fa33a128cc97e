"""``paged-mla bench``: what is refused before anything is allocated, and what is printed."""

import re

import pytest
import torch

from paged_mla_optimized import MlaConfig
from paged_mla_optimized.commands import bench, timing
from paged_mla_optimized.commands.timing import Step, Timed
from paged_mla_optimized.tensors.latent_cache import empty_cache

SMALL = ("--dims", "small", "--cache-format", "fp16", "--rows", "2", "--seq-len", "70")
GIB = 1 << 30


def config(**changes):
    sizes = {"num_heads": 128, "max_rows": 64, "max_query_tokens": 64, "max_model_len": 4096}
    return MlaConfig(**({"softmax_scale": 192**-0.5, "block_size": 64} | sizes | changes))


def test_the_interpreter_runs_a_small_step_with_a_note_about_its_times(capsys):
    assert bench.main([*SMALL, "--query-len", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model     small (kv_lora_rank 32, qk_rope_head_dim 16); float16")
    assert lines[1].startswith("step      2 rows of 70 tokens, 3 of them queries, 4 heads, 0.0")
    assert "Triton's interpreter, torch " in lines[2]
    assert lines[3].startswith("kernel    portable Triton kernel; not few")
    assert re.match(r"time      [\d.]+ us \(median of 3\), least [\d.]+, middle half", lines[4])
    assert lines[5:] == [
        "These are times of the interpreter on a CPU. They do not predict times on a GPU."
    ]


def test_rates_are_those_of_the_median():
    """By hand: 64 rows of 4096 tokens of 1152 bytes; 128 heads x (576 + 512) x 2 for each key."""
    step, found = Step(64, 4096, 1), Timed([0.125, 0.25, 0.25, 0.5], 0)
    assert bench.rates(step, config(), found) == {
        "time": "250.0 us (median of 4), least 125.0, middle half 250.0 to 500.0",
        "cache": "1208.0 GB/s, each cached token read once",
        "products": "292.06 TFLOP/s",
    }


def test_a_query_sees_no_key_behind_it():
    """S-4: four queries at the end of a row of ten see 7, 8, 9 and 10 keys."""
    assert Step(3, 10, 4).seen == 3 * (7 + 8 + 9 + 10)


def test_bytes_are_those_of_the_cache_the_queries_and_the_outputs():
    """By hand: 2 rows of 2 blocks; 3 tokens of 4 heads each, and an lse in float32."""
    cfg = config(num_heads=4, kv_lora_rank=32, qk_rope_head_dim=16)
    assert Step(2, 70, 3).nbytes(cfg) == 2 * 2 * 64 * 96 + 2 * 3 * 4 * (2 * (32 + 16 + 32) + 4)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "fp8_ds_mla", "fp8_block_group"])
def test_contents_are_random_and_finite(name):
    cache = empty_cache(config(cache_format=name), 8, "cpu")
    timing.fill(cache)
    rows = cache.latents
    if name == "fp8_ds_mla":
        codes, scales, k_pe = rows.split([512, 16, 128], dim=-1)
        assert scales.contiguous().view(torch.float32).abs().max() < 2
        assert k_pe.contiguous().view(torch.bfloat16).abs().max() < 2
        rows = codes.contiguous().view(torch.float8_e4m3fn)
    values = rows.view(torch.float8_e4m3fn) if rows.dtype is torch.uint8 else rows
    assert values.float().isfinite().all()
    assert values.float().unique().numel() > 100
    assert cache.scales is None or (cache.scales == 1).all()


def test_a_step_larger_than_the_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 80 * GIB))
    device = torch.device("cuda", 0)
    timing.check_fits(Step(64, 4096, 1), config(), device)
    with pytest.raises(timing.Unsupported, match=r"needs 18\.\d\d GiB, and 3\.00 GiB of the GPU"):
        timing.check_fits(Step(64, 4096 * 64, 1), config(), device)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--query-len", "71"], "--query-len: got 71; allowed: at most --seq-len, 70"),
        ([*SMALL, "--dtype", "float32"], "--dtype: got float32; allowed: float16, the dtype of"),
        ([*SMALL[:4], "--rows", str(2**31), "--seq-len", "1"], "max_rows: got 2147483648; allowed"),
        ([*SMALL[:4], "--rows", "64", "--seq-len", "4096"], "1,048,576 scores"),
        (
            ["--rows", "2", "--seq-len", "70"],
            "dtype torch.bfloat16 is not supported by Triton's interpreter",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(capsys, arguments, message):
    assert bench.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("paged-mla bench: ")
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", "70"], "the following arguments are required: --rows"),
        (["--rows", "0", "--seq-len", "70"], "--rows: got '0'; allowed: integers >= 1"),
        ([*SMALL, "--cache-format", "int4"], "--cache-format: got 'int4'; allowed: bf16, "),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_without_a_gpu_there_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(bench, "is_interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(list(SMALL)) == 2
    assert (
        "torch finds no GPU; run paged-mla doctor to see what is missing" in capsys.readouterr().err
    )


def test_buffers_that_do_not_fit_with_the_step_are_an_error(capsys, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

    monkeypatch.setattr(bench, "timed", fail)
    assert bench.main(list(SMALL)) == 2
    assert capsys.readouterr().err == (
        "paged-mla bench: the GPU is out of memory; use fewer --rows\n"
    )
