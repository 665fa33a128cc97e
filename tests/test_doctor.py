"""Tests of ``paged-mla doctor``: versions, GPUs, kernels and engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.installed import import_or_skip
from paged_mla import doctor
from paged_mla.requirements import Requirement, requirements

ALONE = """
import sys
for name in ("torch", "triton", "pytest"):
    sys.modules[name] = None  # as if it were not installed
from paged_mla.command import main
sys.exit(main(["doctor", "--arch", "sm90"]))
"""
HOPPER = "NVIDIA H100 80GB HBM3, 9.0, 81559 MiB, 570.86.15"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch):
    """Return a function that puts an ``nvidia-smi`` that runs a shell line on the path."""

    def put(line: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return put


@pytest.fixture
def said(capsys):
    """Return a function that runs the command and returns its lines with single spaces."""

    def run(*arguments: str) -> list[str]:
        assert doctor.main(list(arguments)) == 0
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.fixture
def install(tmp_path: Path, monkeypatch):
    """Return a function that creates a package with metadata on Python's path."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, version: str) -> None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise AssertionError('imported')\n")
        info = tmp_path / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")

    return put


def test_it_lists_installed_packages_and_whether_they_are_supported(said):
    lines = said()
    assert any(line.startswith("paged-mla 0.1.0 in /") for line in lines)
    assert any(line.startswith("PyTorch ") and "supported (>=2.11)" in line for line in lines)
    assert any(line.startswith("Triton ") and "supported (>=3.6, <3.10)" in line for line in lines)


def test_without_torch_and_triton_it_shows_the_extra_and_the_kernels():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    missing = 'not installed (>=2.11): pip install "paged-mla[optimized]"'
    assert f"PyTorch - {missing}" in lines
    assert "decode, 1 token for each row 16 pairs Gluon kernel few" in lines


def test_a_version_outside_the_bounds_is_not_supported(said, install):
    install("vllm", "0.24.0")
    assert 'vLLM 0.24.0 not supported (>=0.25, <0.34): pip install "paged-mla[vllm]"' in said()


@pytest.mark.parametrize(
    ("version", "is_allowed"),
    [
        ("3.5.9", False),
        ("3.6", True),
        ("3.6.0", True),
        ("3.9.1+git1234", True),
        ("3.10.0", False),
        ("3.10.0rc1", False),
        ("0.1.dev7+g1a2b3c4", True),
    ],
)
def test_versions_are_compared_number_by_number(version: str, is_allowed):
    assert Requirement("triton<3.10,>=3.6; extra == 'all'").allows(version) == is_allowed


def test_every_bound_of_the_distribution_is_parsed():
    known = requirements()
    assert {"python", "numpy", "torch", "triton", "vllm", "sglang", "transformers"} <= set(known)
    assert all(requirement.bounds for requirement in known.values())


def test_sm90_gets_gluon_kernels_and_the_reasons(said):
    lines = said("--arch", "sm90", "--heads", "16", "128")
    steps = "verify, 4 drafts and 1 token for each row"
    assert "decode, 1 token for each row 16 pairs Gluon kernel few" in lines
    assert f"{steps} 80 pairs Gluon kernel tile" in lines
    assert f"{steps} 640 pairs Gluon kernel tile" in lines
    assert "not few: serves at most 32 pairs of token and head" in lines
    assert "On sm80, sm86, sm89, sm100, sm120: portable Triton kernel" in lines


def test_sm80_gets_the_portable_kernel_and_the_reason(said):
    text = "\n".join(said("--arch", "sm80"))
    served, elsewhere = text.split("On sm86")
    assert "Gluon" not in served
    assert served.count("portable Triton kernel") == 8
    assert "not few, tile, few_fp8, tile_fp8, tile_exact: made for sm90, not sm80" in served
    assert "On sm90: Gluon kernel few, Gluon kernel tile" in elsewhere


def test_the_configuration_decides_the_kernel(said):
    fast = ("--cache-format", "fp8_e4m3", "--products", "fast", "--heads", "128")
    decode = "decode, 1 token for each row 128 pairs Gluon kernel"
    assert f"{decode} tile_fp8" in said("--arch", "sm90", *fast)
    small = said("--arch", "sm90", "--dims", "mistral-small-4", "--block-size", "16")
    assert "bf16 cache in blocks of 16 tokens, 10,240 bytes for each block and layer" in small
    assert any("made for kv_lora_rank 512" in line for line in small)
    half = said("--arch", "sm90", "--dtype", "float16", "--block-size", "16")
    assert "fp16 cache in blocks of 16 tokens, 18,432 bytes for each block and layer" in half


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dims", "qwen"], "--dims: got 'qwen'; allowed: deepseek-v3, deepseek-v2, "),
        (["--arch", "sm75"], "--arch: got 'sm75'; allowed: sm80, sm86, "),
        (["--heads", "0"], "--heads: got '0'; allowed: integers >= 1"),
        (
            ["--dtype", "float16", "--cache-format", "bf16"],
            "--dtype: got float16; allowed: bfloat16, ",
        ),
        (
            ["--cache-format", "fp8_block_group", "--block-size", "6"],
            "--block-size: got 6; allowed: multiples of 4 with --cache-format fp8_block_group",
        ),
    ],
)
def test_the_error_of_a_wrong_option_has_one_line(arguments: list[str], message: str):
    done = subprocess.run(
        [sys.executable, "-m", "paged_mla", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_gpu_it_names_the_interpreter(said, monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    assert "No GPU was found. TRITON_INTERPRET=1 runs the kernels on the CPU, slowly." in said()


def test_each_gpu_has_a_line_and_each_architecture_its_kernels(said, smi):
    smi(f"echo '{HOPPER}'; echo 'NVIDIA L4, 8.9, 23034 MiB, 570.86.15'")
    lines = said()
    assert "NVIDIA H100 80GB HBM3, sm90, 81559 MiB, driver 570.86.15" in lines
    assert "NVIDIA L4, sm89, 23034 MiB, driver 570.86.15" in lines
    assert [line.split()[2] for line in lines if line.startswith("Kernels on")] == ["sm89", "sm90"]


def test_a_gpu_without_kernels_is_named(said, smi):
    smi("echo 'Tesla T4, 7.5, 15360 MiB, 570.86.15'")
    capability = "compute capability 7.5, which no kernel supports"
    assert f"Tesla T4, {capability}, 15360 MiB, driver 570.86.15" in said()


def test_a_torch_that_sees_no_gpu_is_named(said, smi, monkeypatch):
    torch = import_or_skip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    smi(f"echo '{HOPPER}'")
    assert any(line.startswith("PyTorch cannot use these GPUs. Install") for line in said())


@pytest.mark.parametrize(
    "failure", ["echo 'Failed to initialize NVML' >&2; exit 9", "echo 'Failed to initialize NVML'"]
)
def test_a_failing_nvidia_smi_is_quoted(said, smi, failure: str):
    smi(failure)
    assert "nvidia-smi failed: Failed to initialize NVML" in said()


def test_an_engine_is_named_with_its_plugin_and_the_option_that_selects_it(said, install):
    install("vllm", "0.26.0")
    install("sglang", "0.5.20")
    registration = import_or_skip("paged_mla_optimized.engines.vllm.registration")
    lines = said()
    assert "vLLM 0.26.0 supported (>=0.25, <0.34)" in lines
    assert "The plugin is registered (entry point of vllm.general_plugins)." in lines
    chosen = f"vllm serve MODEL --attention-backend {registration.NAME}"
    assert f"Selected by: {chosen}" in lines
    assert "SGLang 0.5.20 supported (>=0.5.17, <0.6)" in lines
    assert any("--attention-backend paged_mla --page-size 64" in line for line in lines)


def test_an_engine_that_is_not_installed_is_named_with_the_command_for_it(said, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", lambda _: None)
    assert 'vLLM - not installed (>=0.25, <0.34): pip install "paged-mla[vllm]"' in said()


def test_a_plugin_that_is_not_registered_is_named_with_the_command_for_it(
    said, install, monkeypatch
):
    install("vllm", "0.26.0")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    lines = said()
    assert "The plugin is not registered (entry point of vllm.general_plugins)." in lines
    assert "pip install --force-reinstall --no-deps paged-mla" in lines


def test_code_in_a_folder_is_reported_as_not_installed(said, monkeypatch):
    monkeypatch.setattr(doctor, "requirements", dict)
    assert "The package is not installed: pip install paged-mla" in said()


@pytest.mark.parametrize(("option", "largest"), [("--heads", 128), ("--block-size", 32768)])
def test_sizes_that_no_instance_accepts_are_an_error(option: str, largest: int, capsys):
    """The command allows the same sizes as ``MlaConfig``."""
    assert doctor.main([option, str(largest)]) == 0
    assert doctor.main([option, str(largest + 1)]) == 2
    told = capsys.readouterr().err
    assert told == f"paged-mla doctor: {option}: got {largest + 1}; allowed: 1 to {largest}\n"
