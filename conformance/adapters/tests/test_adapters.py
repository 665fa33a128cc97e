"""Tests of the adapters, also on machines without the packages that they adapt."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paged_mla_adapters.declared import peer
from paged_mla_conformance.run.expected_failures import load_expected_failures
from paged_mla_shared.errors import Unsupported

FOLDER = Path(__file__).parents[1]
NEEDS = {
    "vllm_triton:create": "vllm",
    "sglang_triton:create": "sglang",
    "flashmla:create": "flash_mla",
    "flashmla_fp8:create": "vllm",
    "flashinfer:fa2": "flashinfer",
    "flashinfer:fa3": "flashinfer",
}
REPORTS = sorted((FOLDER / "reports").glob("*.json"))
CRASHES = {  # a file must not list these as expected failures
    "h200-flashmla_fp8": {
        "test_empty[empty-all-rows-bf16-fp8_e4m3]",
        "test_empty[empty-middle-bf16-fp8_e4m3]",
    }
}
COMMAND = re.compile(r"--backend paged_mla_adapters\.(\S+)")


def ask(backend: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the suite on a backend; modules in the folder of this file can be imported."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.getenv("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "paged_mla", "conformance", "--backend", backend, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )


@pytest.mark.parametrize("adapter", NEEDS)
def test_an_adapter_without_its_package_is_skipped(adapter: str):
    """Without the adapter's package, the suite prints the reason and skips its tests."""
    if importlib.util.find_spec(NEEDS[adapter]):
        pytest.skip(f"{NEEDS[adapter]} is installed")
    done = ask(f"paged_mla_adapters.{adapter}")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    reason = f"the package {NEEDS[adapter]} is not installed"
    if adapter == "flashmla:create":
        reason = "the package vllm is not installed"  # which carries the library too
    assert f"SKIPPED: paged_mla_adapters.{adapter} cannot run here: {reason}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_package_is_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A package whose own imports are missing is an error with a traceback."""
    (tmp_path / "half_installed.py").write_text("import a_package_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        peer("half_installed")
    with pytest.raises(Unsupported, match="package nobody_has is not installed, or has no "):
        peer("nobody_has.here", "nobody_has.there")


def test_the_page_names_every_adapter():
    """The page has a command for every adapter, and for no others."""
    assert set(COMMAND.findall((FOLDER / "README.md").read_text())) == set(NEEDS)


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.stem)
def test_expected_failures_are_those_of_the_report(report: Path):
    """The adapter's file lists exactly the failures of its report, except for crashes."""
    found = json.loads(report.read_text())
    failed = {r["test"] for r in found["results"] if r["outcome"] in {"failed", "expected-failure"}}
    path = FOLDER / report.with_suffix(".toml").name.removeprefix("h200-")
    expected = set(load_expected_failures(path)) if path.exists() else set()
    assert failed == expected | CRASHES.get(report.stem, set())
    assert found["profile"].endswith(",kernel")


@pytest.mark.parametrize(
    ("kernel", "profile"),
    [("flashinfer", "base-2,kernel"), ("uniform", "kernel"), ("flashmla_fp8", "kernel")],
)
def test_a_right_kernel_passes_the_whole_suite(kernel: str, profile: str):
    """The adapter's code makes no test fail, with ragged and with uniform rows."""
    done = ask(f"by_hand:{kernel}", "--profile", profile)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.splitlines()[-1].startswith("CONFORMANT with exclusions:")
