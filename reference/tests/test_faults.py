"""Faults are data: named, described, of a known fault, and each changes one thing."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from paged_mla_reference.faults import CATALOGUE, FaultClass, Kind, of_kind
from paged_mla_reference.faults.fault import faults_of, kernel_fault
from paged_mla_reference.faults.reports import PROJECTS, link
from paged_mla_reference.oracle import RIGHT
from paged_mla_reference.rules import RULES, fp8
from paged_mla_reference.rules.prefix import block_keys

KERNEL = of_kind(Kind.KERNEL)


@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=CATALOGUE)
def test_a_fault_has_a_description(fault):
    """Rules exist, reports have a form, and there is a sentence."""
    assert fault.rules
    assert set(fault.rules) <= set(RULES)
    assert all(link(citation) for citation in (*fault.citations, *fault.akin))
    assert fault.what.endswith(".")


@pytest.mark.parametrize("fault", KERNEL.values(), ids=KERNEL)
def test_a_kernel_fault_exchanges_something(fault):
    """The right oracle stays as it is."""
    kept = vars(RIGHT).copy()
    wrong = fault.change(RIGHT)
    assert vars(RIGHT) == kept
    assert vars(wrong) != kept


def assert_same(mine: list[bytes], theirs: list[bytes]):
    assert mine == theirs
    raise TypeError


def test_an_engine_fault_ends_with_its_context():
    """S-13: the engine is correct again afterwards, even after an exception."""
    one, other = (1, 2, 3, 4), (1, 2, 3, 5)
    with pytest.raises(TypeError), CATALOGUE["hash-ignores-the-last-token"].change():
        assert_same(block_keys(one, 4), block_keys(other, 4))
    assert block_keys(one, 4) != block_keys(other, 4)


def test_attention_is_wrong_in_its_own_thread():
    """S-11: explanations try ways of attending side by side."""
    code = np.array([0x7F], np.uint8)

    def attend(*_):
        with ThreadPoolExecutor(1) as pool:
            return fp8.decode(code), pool.submit(lambda: fp8.decode(code)).result()

    wrong = CATALOGUE["nan-codes-are-read-as-480"].change(replace(RIGHT, attend=attend))
    here, elsewhere = wrong.attend(None, None, None)
    assert here == 480
    assert np.isnan(elsewhere)


def test_one_catalogue_has_every_kind():
    """Each kind has its faults, and the lookup by name finds the one of that name."""
    assert {fault.kind for fault in CATALOGUE.values()} == set(Kind)
    assert all(fault.name == name for name, fault in CATALOGUE.items())


def test_names_are_unique():
    """Every fault has a distinct name."""
    module = type(re)("twice")
    module.first = kernel_fault(FaultClass.LSE, "S-7")(lambda oracle: oracle)
    module.second = module.first
    with pytest.raises(ValueError, match="two faults have the name"):
        faults_of([module])


@pytest.mark.parametrize(
    ("citation", "leads_to"),
    [
        ("vllm#47671", "https://github.com/vllm-project/vllm/issues/47671"),
        ("flashinfer@446a0adf1", "https://github.com/flashinfer-ai/flashinfer/commit/446a0adf1"),
        ("sglang@KNOWN_FAILURES", "https://github.com/sgl-project/sglang/search?q=KNOWN_FAILURES"),
    ],
)
def test_a_citation_leads_somewhere(citation, leads_to):
    """A number, a commit, or a word to look for."""
    assert link(citation) == leads_to


@pytest.mark.parametrize("citation", ["vllm", "vllm#", "vllm#0", "vllm#12a", "nobody#1", "vllm@"])
def test_no_citation_is_made_up(citation):
    """The project is known, and the citation has a legal form."""
    with pytest.raises(ValueError, match="does not name a project"):
        link(citation)


def test_repositories_have_an_owner():
    """Every short name belongs to one repository."""
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in PROJECTS.values())
    assert len(set(PROJECTS.values())) == len(PROJECTS)
