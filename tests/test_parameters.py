"""Tests of limits on the parameters of functions and on the code that an import loads."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_OF_A_KERNEL = 32
MOST_OF_A_FUNCTION = 8
MOST_LINES = 10_100  # of code: without empty lines, comments and docstrings
FOREIGN = {  # signatures that engines, torch.library and replaced packages define
    "paged_mla_adapters/flashinfer_bench/sources/reference.py:attend",
    "paged_mla_adapters/flashinfer_bench/sources/solution.py:attend",
    "paged_mla_optimized/drop_in/flash_mla.py:flash_mla_with_kvcache",
    "paged_mla_optimized/engines/sglang/backend.py:forward_decode",
    "paged_mla_optimized/engines/vllm/backend.py:supports_combination",
    "paged_mla_optimized/engines/vllm/impl.py:__init__",
    "paged_mla_optimized/api/torch_ops.py:attend",
    "paged_mla_optimized/api/torch_ops.py:plan",
}


def count(node):
    """Return the number of parameters of a function, without ``self``."""
    of = node.args
    names = [one.arg for one in (*of.posonlyargs, *of.args, *of.kwonlyargs)]
    collected = [one for one in (of.vararg, of.kwarg) if one is not None]
    return len([name for name in names if name not in {"self", "cls"}]) + len(collected)


def is_compiled(node):
    """Return whether Triton compiles a function."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.fixture(scope="module")
def counts():
    """Return the numbers of parameters by place, of compiled functions and of other functions."""
    found = {True: {}, False: {}}
    for source in (ROOT / "src", *ROOT.glob("*/src"), *ROOT.glob("*/*/src")):
        for path in source.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    place = f"{path.relative_to(source).as_posix()}:{node.name}"
                    of_kind = found[is_compiled(node)]
                    of_kind[place] = max(count(node), of_kind.get(place, 0))
    return found


def test_kernels_take_records(counts):
    kernels = counts[True]
    assert len([place for place in kernels if place.endswith("_kernel")]) > 20
    longer = {place: n for place, n in kernels.items() if n > MOST_OF_A_KERNEL}
    assert longer == {}


def test_functions_of_the_host_are_short(counts):
    longer = {place for place, n in counts[False].items() if n > MOST_OF_A_FUNCTION}
    assert longer == FOREIGN


def test_the_attention_loads_few_lines():
    """The test imports PagedMla in its own process and counts the lines of code that it loads."""
    loaded = (
        "import sys; from paged_mla_optimized import PagedMla; "
        "files = [m.__file__ for n, m in [*sys.modules.items()] if n.startswith('paged_mla')]; "
        "print(*filter(None, files), sep='\\n')"
    )
    sources = [*ROOT.glob("*/src"), *ROOT.glob("*/*/src"), ROOT / "src"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}
    done = subprocess.run(
        [sys.executable, "-c", loaded], env=environment, capture_output=True, text=True, check=True
    )
    assert 0 < sum(map(lines_of_code, map(Path, done.stdout.splitlines()))) <= MOST_LINES


def lines_of_code(path: Path) -> int:
    """Return how many lines of a file are neither empty nor part of a comment or a docstring."""
    source = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = enumerate(source.splitlines(), start=1)
    return sum(n not in texts and line.strip()[:1] not in {"", "#"} for n, line in lines)
