"""Tests that fingerprints show the variants that a change of the sources affects (S-20)."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import triton
import triton.language as tl

from paged_mla_optimized.runtime.kernel_spec import KernelSpec
from paged_mla_optimized.tools import fingerprints
from paged_mla_optimized.tools.aot_job import Job

ARCH = "sm90"


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def kernel(x_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(x_ptr + at, doubled(tl.load(x_ptr + at)))


@triton.jit
def same_kernel(x_ptr, COUNT: tl.constexpr):  # another name, and no call of a function
    """Store twice the value that was there."""
    lines = tl.arange(0, COUNT)
    x = tl.load(x_ptr + lines)
    tl.store(x_ptr + lines, x + x)


@triton.jit
def other_kernel(x_ptr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 3)


@triton.jit
def scaled_kernel(x_ptr, y_ptr, scale, count, _spare, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    for step in range(count):
        tl.store(y_ptr + at + step, tl.load(x_ptr + at) * scale)


@triton.jit
def reordered_kernel(count, y_ptr, _spare, x_ptr, COUNT: tl.constexpr, scale):
    at = tl.arange(0, COUNT)
    for step in range(count):
        tl.store(y_ptr + at + step, tl.load(x_ptr + at) * scale)


class Pair(NamedTuple):
    x_ptr: tl.tensor
    y_ptr: tl.tensor


class Size(NamedTuple):
    COUNT: tl.constexpr


@triton.jit
def records_kernel(pair: Pair, scale, count, _spare, size: Size):
    at = tl.arange(0, size.COUNT)
    for step in range(count):
        tl.store(pair.y_ptr + at + step, tl.load(pair.x_ptr + at) * scale)


@triton.jit
def swapped_kernel(x_ptr, y_ptr, scale, count, _spare, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    for step in range(scale):
        tl.store(y_ptr + at + step, tl.load(x_ptr + at) * count)


@triton.jit
def third(x_ptr):
    return x_ptr + 3


@triton.jit
def constants_kernel(x_ptr, COUNT: tl.constexpr):
    tl.store(x_ptr + 3, COUNT)
    tl.store(x_ptr + 4, 5)


@triton.jit
def other_constants_kernel(x_ptr, COUNT: tl.constexpr):
    tl.store(x_ptr + 4, COUNT)
    tl.store(x_ptr + 3, 5)


@triton.jit
def called_constants_kernel(x_ptr, COUNT: tl.constexpr):
    tl.store(third(x_ptr), COUNT)
    tl.store(x_ptr + 4, 5)


TYPES = {"x_ptr": "*fp32", "y_ptr": "*fp16"}


def job(kernel, constants=(("COUNT", 128),), **changes):
    """Return a variant of a kernel."""
    given = {"types": TYPES} | changes
    return Job("one", KernelSpec(kernel, dict(constants), **given), "fp32")


JOB = job(kernel)


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Return the tool's list of variants, which tests change; its files are in a folder."""
    found = [JOB]
    monkeypatch.setattr(fingerprints, "jobs_of_arch", lambda _arch: found)
    monkeypatch.setattr(fingerprints, "FOLDER", tmp_path)
    monkeypatch.setattr(fingerprints, "is_interpreting", lambda: False)
    monkeypatch.setattr(fingerprints, "ProcessPoolExecutor", _NoProcesses)
    return found


class _NoProcesses:
    """An executor that runs in this process, because no other can import its kernels."""

    def __init__(self, *_args, **_named):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        pass

    def map(self, function, jobs, **_options):
        return map(function, jobs)


def run(capsys, *options):
    """Return the exit status and the output."""
    status = fingerprints.main(["--arch", ARCH, *options])
    return status, capsys.readouterr().out


def test_names_and_functions_change_no_fingerprint():
    meaning = fingerprints.meaning_of(JOB, ARCH)
    assert fingerprints.meaning_of(job(same_kernel), ARCH) == meaning
    assert fingerprints.source_of(job(same_kernel)) != fingerprints.source_of(JOB)


def test_the_order_of_parameters_changes_no_fingerprint():
    meaning = fingerprints.meaning_of(job(scaled_kernel, types=TYPES | {"scale": "i64"}), ARCH)
    reordered = job(reordered_kernel, types=TYPES | {"scale": "i64"})
    assert fingerprints.meaning_of(reordered, ARCH) == meaning
    others = job(swapped_kernel, types=TYPES | {"count": "i64"})  # the same with other names
    assert fingerprints.meaning_of(others, ARCH) == meaning
    for types in (TYPES | {"scale": "i64"}, {"x_ptr": "*fp16", "y_ptr": "*fp32", "count": "i64"}):
        assert fingerprints.meaning_of(job(swapped_kernel, types=types), ARCH) != meaning


def test_records_of_parameters_change_no_fingerprint():
    meaning = fingerprints.meaning_of(job(scaled_kernel, types=TYPES | {"scale": "i64"}), ARCH)
    types = {"pair": Pair("*fp32", "*fp16"), "scale": "i64"}
    of_records = job(records_kernel, {"size": Size(128)}, types=types)
    assert fingerprints.meaning_of(of_records, ARCH) == meaning
    unaligned = job(records_kernel, {"size": Size(64)}, types=types)
    assert fingerprints.meaning_of(unaligned, ARCH) != meaning


def test_the_order_of_constants_changes_no_fingerprint():
    meaning = fingerprints.meaning_of(job(constants_kernel), ARCH)
    assert fingerprints.meaning_of(job(called_constants_kernel), ARCH) == meaning
    assert fingerprints.meaning_of(job(other_constants_kernel), ARCH) != meaning


@pytest.mark.parametrize(
    "changed",
    [
        job(other_kernel),
        job(kernel, {"COUNT": 256}),
        job(kernel, types={"x_ptr": "*fp16"}),
        job(kernel, options={"num_warps": 8}),
        job(kernel, options={"maxnreg": 64}),
    ],
    ids=["kernel", "constants", "types", "num_warps", "maxnreg"],
)
def test_every_input_of_the_compiler_changes_the_fingerprint(changed):
    assert fingerprints.meaning_of(changed, ARCH) != fingerprints.meaning_of(JOB, ARCH)
    assert fingerprints.source_of(changed) != fingerprints.source_of(JOB)


def test_a_variant_that_differs_is_named(jobs, capsys):
    assert run(capsys, "--renew")[0] == 0
    assert run(capsys) == (0, "sm90: 1 variants, 1 before\n0 variants differ\n")
    jobs[:] = [replace(job(same_kernel), name="renamed")]
    assert run(capsys) == (0, "sm90: 1 variants, 1 before\n0 variants differ\n")
    jobs.append(replace(job(other_kernel), name="new"))
    status, printed = run(capsys)
    assert status == 1
    assert "sm90: new differs\n1 variants differ\n" in printed


@pytest.mark.usefixtures("jobs")
def test_known_variants_are_not_compiled_again(capsys, monkeypatch):
    run(capsys, "--renew")
    monkeypatch.setattr(fingerprints, "meaning_of", None)
    assert run(capsys)[0] == 0


@pytest.mark.usefixtures("jobs")
def test_another_triton_has_no_known_variants(capsys, tmp_path):
    run(capsys, "--renew")
    path = tmp_path / f"{ARCH}.txt"
    path.write_text(re.sub(r"^triton .*", "triton 2.0.0", path.read_text()))
    assert "1 variants, 0 before" in run(capsys)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "0"), "--workers: got 0; allowed: 1 or more"),
        (("--tree", "nowhere"), "--tree: got nowhere; allowed: a checkout of this repository"),
    ],
)
@pytest.mark.usefixtures("jobs")
def test_wrong_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        fingerprints.main(list(options))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
