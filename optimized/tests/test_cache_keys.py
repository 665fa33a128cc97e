"""What Triton calls a binary on disk depends on its kernel alone (compiled mode, another process).

Engines start many processes. Without this, each compiles again what another has under another name.
"""

import json
from collections import defaultdict

import pytest
from compiled_mode import run

NAME_THEM = """
import importlib, json, pkgutil, sys
import paged_mla_optimized.kernels as package
from paged_mla_optimized.runtime.launch import Launcher
from paged_mla_optimized.runtime.kernel_spec import KernelSpec
found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
modules = [importlib.import_module(module.name) for module in found]
functions = [value for module in modules for value in vars(module).values() if hasattr(value, "fn")]
kernels = {one.fn.__name__: one for one in functions if one.fn.__name__.endswith("_kernel")}
names = sorted(kernels, reverse=sys.argv[1] == "reversed")
for name in names:
    Launcher(KernelSpec(kernels[name], {}))
    kernels[name].cache_key  # as in a launch
print(json.dumps({
    name: {
        "key": kernels[name].cache_key,
        "constants": [(n, str(v)) for (n, _), (v, _) in kernels[name].used_global_vals.items()],
    }
    for name in sorted(kernels)
}))
"""


def named(order):
    done = run("-c", NAME_THEM, order)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kernels():
    return named("in order")


def test_names_do_not_tell_which_kernel_came_first(kernels):
    other = named("reversed")
    assert len(kernels) > 20
    assert [name for name in kernels if kernels[name]["key"] != other[name]["key"]] == []


def test_constants_of_one_name_have_one_value(kernels):
    """Triton orders them by name, and those of one name by the addresses of their modules."""
    for name, kernel in kernels.items():
        values = defaultdict(set)
        for constant, value in kernel["constants"]:
            values[constant].add(value)
        twice = {constant: found for constant, found in values.items() if len(found) > 1}
        assert not twice, name
