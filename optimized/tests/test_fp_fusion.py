"""Bits depend on whether `a * b + c` is rounded once; the default of Triton's versions differs."""

import ast
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

import paged_mla_optimized
from paged_mla_optimized.operations.merge.partials import merge_spec
from paged_mla_optimized.runtime.kernel_spec import FP_FUSION
from paged_mla_optimized.tools.aot_job import Job

SOURCE = Path(paged_mla_optimized.__file__).parent


def launches():
    """Return every call of the form ``kernel[grid](...)`` in the package, by its place."""
    return {
        f"{path.relative_to(SOURCE)}:{node.lineno}": node
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        if ast.unparse(node.func.value).endswith("_kernel")
    }


def test_every_launch_sets_whether_products_and_sums_are_fused():
    """`Launcher` does for all it launches, see `test_launch.py`; the others name the option."""
    found = {place: ast.unparse(call) for place, call in launches().items()}
    by_launcher = {place for place in found if place.startswith("runtime/launch.py")}
    assert len(by_launcher) == 1
    silent = {p for p, call in found.items() if ".launched)" not in call}
    assert silent == by_launcher
    assert len(found) > len(by_launcher)


def options_of(job, arch):
    """Return the options that Triton's compiler makes of a job's."""
    return make_backend(GPUTarget("cuda", arch, 32)).parse_options(dict(job.options))


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_the_default_of_triton_or_of_an_environment_changes_nothing(monkeypatch, arch, default):
    """The default is False in Triton 3.10, and where `TRITON_DEFAULT_FP_FUSION` is 0."""
    monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", default)
    job = Job("merge", merge_spec(64), "fp32")
    assert options_of(job, arch).enable_fp_fusion is True


def test_a_binary_on_disk_is_found_by_this_option_too(monkeypatch):
    """Triton names a binary after a hash of its options, in which this one is."""
    job = Job("merge", merge_spec(64), "fp32")
    hashes = set()
    for fused in (True, False):
        monkeypatch.setitem(FP_FUSION, "enable_fp_fusion", fused)
        hashes.add(options_of(job, 90).hash())
    assert len(hashes) == 2
