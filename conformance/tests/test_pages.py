"""Pages for users with their own kernel: their commands work, and their tables are up to date."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from running import ROOT, last_line, run_suite

from paged_mla_conformance import template
from paged_mla_reference.backend import CAPABILITIES
from paged_mla_shared.backend import OPERATIONS, BoundedBackend, Capabilities, Runner
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch

YOURS = (ROOT / "conformance" / "docs" / "your-backend.md").read_text()
PROTOCOL = (ROOT / "shared" / "docs" / "protocol.md").read_text()
WORDS = ("dtypes", "masks", "ropes", "features")


def first_column(heading: str) -> set[str]:
    """Return the code words in the first column of the table, or tables, under a heading."""
    [section] = re.findall(rf"^#+ {heading}\n(.+?)(?=^#|\Z)", PROTOCOL, re.DOTALL | re.MULTILINE)
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {word for cell in cells for word in re.findall(r"`(\w[\w:]*)", cell)}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Copy the template as the page does; return the arguments of the page's two commands."""
    (tmp_path / "my_mla.py").write_text(Path(template.__file__).read_text())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return [
        line.split() for line in re.findall(r"^paged-mla conformance (.+)$", YOURS, re.MULTILINE)
    ]


def test_the_copy_of_the_template_gets_the_quick_verdict(commands: list[list[str]]):
    """S-20: the first command of the page passes and prints the quick verdict."""
    done = run_suite(*commands[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_line(done.stdout).startswith("PASSED in part: numpy-template ")


def test_the_verdict_is_the_one_on_the_page(commands: list[list[str]]):
    """S-20: the second command of the page prints the verdict that the page quotes."""
    [promised] = re.findall(r"^- `(CONFORMANT.+) \.\.\.`, exit status 0", YOURS, re.MULTILINE)
    done = run_suite(*commands[1])
    assert last_line(done.stdout).startswith(promised)
    assert done.returncode == 0


def test_the_template_is_short():
    """S-20: the template has about 70 lines, as its docstring states."""
    code = Path(template.__file__).read_text()
    assert 65 <= sum(bool(line.strip()) for line in code.splitlines()) <= 75


@pytest.mark.parametrize("field", WORDS)
def test_every_word_is_on_the_page(field: str):
    """S-20: the page lists exactly the words that the reference declares."""
    assert first_column(field) == getattr(CAPABILITIES, field)


def test_words_are_those_of_the_protocol():
    """S-20: the page and the docstring name the same masks, ropes and features."""
    quoted = set(re.findall(r'"([a-z_:]+)"', Capabilities.__doc__))
    assert quoted == set().union(*map(first_column, ("masks", "ropes", "features")))
    others = {field.name for field in fields(Capabilities)} - {"ops", "cache_formats", *WORDS}
    assert first_column("Limits") == others


def test_every_member_is_on_the_page():
    """S-20: the page has every member of a backend and every array of a batch."""
    assert first_column("Backend") == members(BoundedBackend)
    batches = (Batch, PrefillBatch, LayerBatch)
    assert first_column("Runner") == {name for b in batches for name in b.__dataclass_fields__}


def test_every_call_has_a_docstring():
    """S-20: all calls of a runner except two are operations."""
    calls = members(Runner)
    assert set(OPERATIONS) == CAPABILITIES.ops == calls - {"load_cache", "read_cache"}
    assert all(inspect.getdoc(getattr(Runner, name)) for name in calls)


def members(protocol: type) -> set[str]:
    """Return the public members of a protocol."""
    return {name for name, _ in inspect.getmembers(protocol) if not name.startswith("_")}
