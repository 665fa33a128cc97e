"""Tests of the names of ``paged_mla``, and of the packages that its import needs."""

import subprocess
import sys

import pytest

import paged_mla
import paged_mla_optimized

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # as if they were not installed
import paged_mla
assert paged_mla.Rope and paged_mla.Unsupported
try:
    paged_mla.PagedMla
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize("name", paged_mla.__all__)
def test_every_public_name_can_be_imported(name: str):
    assert getattr(paged_mla, name) is not None


def test_every_public_name_of_the_kernels_exists():
    assert set(paged_mla_optimized.__all__) <= set(dir(paged_mla))


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'paged_mla' has no attribute 'Nope'"):
        _ = paged_mla.Nope


def test_the_import_needs_neither_torch_nor_triton_and_the_error_names_their_extra():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True
    )
    assert done.stdout == 'paged_mla.PagedMla needs torch: pip install "paged-mla[optimized]"\n'


def test_the_import_loads_no_kernel():
    code = "import sys, paged_mla; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
