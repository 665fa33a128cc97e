"""``paged-mla bench`` on a GPU, at DeepSeek-V3's sizes."""

import re
import subprocess
import sys

import pytest
import torch


def bench(*arguments):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "paged_mla", "bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("cache_format", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_times_and_rates_agree(cache_format):
    """64 rows of 4096 tokens, 128 heads: the rates follow from the median that is printed."""
    sizes = ("--heads", "128", "--rows", "64", "--seq-len", "4096")
    done = bench(*sizes, "--cache-format", cache_format)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert torch.cuda.get_device_name() in lines["device"]
    times = r"([\d.]+) us \(median of (\d+)\), least ([\d.]+), middle half ([\d.]+) to ([\d.]+)"
    median, count, least, low, high = map(float, re.fullmatch(times, lines["time"]).groups())
    assert count > 10
    assert least <= low <= median <= high
    token_bytes = {"bf16": 1152, "fp8_e4m3": 576, "fp8_ds_mla": 656}[cache_format]
    gbs = float(re.match(r"[\d.]+", lines["cache"])[0])
    tflops = float(re.match(r"[\d.]+", lines["products"])[0])
    assert gbs == pytest.approx(64 * 4096 * token_bytes / median / 1e3, rel=1e-2)
    assert tflops == pytest.approx(2 * 64 * 4096 * 128 * 1088 / median / 1e6, rel=1e-2)


def test_what_does_not_fit_is_refused_before_it_is_allocated():
    done = bench("--rows", "32766", "--seq-len", "131072")
    assert done.returncode == 2
    assert re.search(r"the step needs [\d,.]+ GiB, and [\d.]+ GiB of the GPU are free", done.stderr)
    assert done.stderr.count("\n") == 1
