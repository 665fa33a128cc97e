"""Private parts of Triton are touched in one folder; what that needs is there in each version."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from compiled_mode import run

import paged_mla_optimized
from paged_mla_optimized.kernels.common.combine import combine_kernel
from paged_mla_optimized.triton_compat import c_launcher, kernels
from paged_mla_optimized.triton_compat.interpreter import is_compiled, is_interpreting

SOURCES = Path(paged_mla_optimized.__file__).parent
PUBLIC = {
    *("triton", "triton.language", "triton.language.extra.cuda", "triton.testing"),
    *("triton.experimental", "triton.experimental.gluon", "triton.experimental.gluon.language"),
    "triton.experimental.gluon.language.nvidia.hopper",
    "triton.experimental.gluon.nvidia.hopper",
}
"""Modules that Triton documents, or that its tutorials import."""
OF_PACKAGES = {"_C", "backends", "compile", "compiler", "core", "knobs", "runtime", "semantic"}
"""Attributes of ``triton``, ``tl`` and ``gl`` that are private parts."""
OF_OBJECTS = {
    *("fn", "params", "arg_names", "is_gluon", "cache_key", "used_global_vals"),  # of kernels
    *("launch_enter_hook", "launch_exit_hook", "packed_metadata", "device_caches"),
    *("_reinterpret", "_semantic", "interpreter_builder", "create_splat"),
}
"""Attributes of what Triton makes that are private parts."""


def private_parts(source: str) -> Iterator[str]:
    """Yield the private parts of Triton that a module imports or reaches."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if _is_private(one.name))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            if _is_private(node.module) or node.module == "inspect":
                yield from (
                    f"{node.module}.{one.name}"
                    for one in node.names
                    if node.module != "inspect" or one.name == "getclosurevars"
                )
            elif node.module.split(".")[0] == "triton":
                yield from (one.name for one in node.names if one.name in OF_PACKAGES)
        elif isinstance(node, ast.Attribute):
            is_of_package = isinstance(node.value, ast.Name) and node.value.id in {
                *("triton", "tl", "gl"),
            }
            if node.attr in OF_OBJECTS or (is_of_package and node.attr in OF_PACKAGES):
                yield ast.unparse(node)


def _is_private(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "triton" and module not in PUBLIC


FILES = sorted(SOURCES.rglob("*.py"))


def test_one_folder_touches_private_parts():
    found = {
        str(path.relative_to(SOURCES)): parts
        for path in FILES
        if path.parent.name != "triton_compat" and (parts := [*private_parts(path.read_text())])
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "from triton.runtime.driver import driver",
        "from triton import knobs",
        "from triton.experimental.gluon._runtime import GluonASTSource",
        "import triton._C.libtriton",
        "from inspect import getclosurevars",
        "hooks = triton.knobs.runtime.launch_enter_hook.calls",
        "name = kernel.fn.__name__",
        "names = kernel.arg_names",
        "tile = buffer._reinterpret(dtype, shape, layout)",
        "is_builtin = tl.core.is_builtin",
    ],
)
def test_a_private_part_is_noticed(line):
    assert [*private_parts(line)]


LOOK = """
import json, tempfile
from pathlib import Path
from paged_mla_optimized.kernels.common import combine
from paged_mla_optimized.kernels.hopper import prefill
from paged_mla_optimized.tools.aot import disassembled
from paged_mla_optimized.tools.aot_jobs import jobs_of_arch
from paged_mla_optimized.triton_compat import compilation, kernels, settings
from paged_mla_optimized.triton_compat.interpreter import is_compiled, is_interpreting

jobs, found = jobs_of_arch("sm90"), {}
for kernel in (combine.combine_kernel, prefill.hopper_prefill_kernel):
    job = next(job for job in jobs if job.kernel is kernel)
    found[kernels.name_of(kernel)] = {
        "module": kernels.module_of(kernel),
        "is_gluon": kernels.is_gluon(kernel),
        "names": kernels.parameter_names(kernel),
        "parameters": kernels.parameters_of(kernel),
        "first_stage": compilation.first_stage(job.source, "sm90", job.options),
    }
job = next(job for job in jobs if job.kernel is combine.combine_kernel)
settings.leave_out_source_lines()
with tempfile.TemporaryDirectory() as folder, settings.cache_in(Path(folder)):
    binary = compilation.compiled(job.source, "sm90", job.options)
    kept = len([*Path(folder).rglob("*.cubin")])
code = {"kept": kept, "has_lines": ".loc" in binary.asm["ptx"], "sass": disassembled(binary)}
modes = {"compiled": bool(is_compiled()), "interprets": is_interpreting()}
print(json.dumps({"kernels": found, "code": code} | modes))
"""


@pytest.fixture(scope="module")
def looked() -> dict[str, Any]:
    """What a process that compiles finds by the functions of the folder."""
    done = run("-c", LOOK)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_process_knows_whether_it_interprets(looked):
    assert (looked["compiled"], looked["interprets"]) == (True, False)
    assert (bool(is_compiled()), is_interpreting()) == (False, True)


def test_kernels_are_described(looked):
    """Name, module and language; and of each parameter what Triton compiles for."""
    portable, gluon = (looked["kernels"][n] for n in ("combine_kernel", "hopper_prefill_kernel"))
    assert portable["module"] == "paged_mla_optimized.kernels.common.combine"
    assert (portable["is_gluon"], gluon["is_gluon"]) == (False, True)
    for kernel in (portable, gluon):
        assert [name for name, *_ in kernel["parameters"]] == kernel["names"]
    parameters = {name: rest for name, *rest in portable["parameters"]}
    assert parameters["joins"] == [False, True]
    assert parameters["num_heads"] == [True, True]


def test_the_interpreter_knows_names_alone():
    assert kernels.name_of(combine_kernel) == "combine_kernel"
    assert kernels.parameter_names(combine_kernel)[0] == "joins_ptr"
    assert kernels.parameters_of(combine_kernel) == []


def test_the_first_stage_is_text_of_the_right_language(looked):
    """TTIR of a portable kernel has no layouts, TTGIR of a Gluon kernel has."""
    portable, gluon = (looked["kernels"][n] for n in ("combine_kernel", "hopper_prefill_kernel"))
    assert "tt.func" in portable["first_stage"]
    assert "#ttg." not in portable["first_stage"]
    assert "ttg.warp_specialize" in gluon["first_stage"]


def test_settings_reach_the_compiler(looked):
    """The folder of binaries, source lines, and the tool that disassembles."""
    code = looked["code"]
    assert (code["kept"], code["has_lines"]) == (1, False)
    assert "EXIT" in code["sass"]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_into_launches_are_seen(name):
    """As a profiler adds and removes them."""
    hooks = getattr(triton.knobs.runtime, name)
    assert not c_launcher.launch_hooks()
    hooks.add(print)
    try:
        assert c_launcher.launch_hooks()
    finally:
        hooks.remove(print)
    assert not c_launcher.launch_hooks()
