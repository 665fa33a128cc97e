"""The expected-failures file must have exact entries with a reason and a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_mla_conformance.run.expected_failures import ExpectedFailure, load_expected_failures

GOOD = 'test = "test_decode[decode-h9-bf16]"\nreason = "odd heads"\nissue = "https://e.org/1"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "expected.toml"
    path.write_text(text)
    return path


def test_an_entry_is_read(tmp_path: Path):
    """An entry has an id, a reason and a link."""
    entries = load_expected_failures(write(tmp_path, f"[[expected_failure]]\n{GOOD}"))
    test = "test_decode[decode-h9-bf16]"
    assert entries == {test: ExpectedFailure(test, "odd heads", "https://e.org/1")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[expected_failure]]\ntest = "a"\nissue = "u"\n', "entry 1 must have exactly"),
        ('[[expected_failure]]\ntest = "a"\nreason = ""\nissue = "u"\n', "non-empty"),
        (f"[[expected_failure]]\n{GOOD}until = '2'\n", "entry 1 must have exactly"),
        (f"[[expected_failure]]\n{GOOD}[[expected_failure]]\n{GOOD}", "listed twice"),
        ("[skips]\n", "only \\[\\[expected_failure\\]\\]"),
        ("expected_failure = 3\n", "expected_failure: got 3"),
        ("expected_failure = [3]\n", "expected_failure: \\[0\\]: got 3"),
        ("test = \n", "got Invalid value"),
    ],
    ids=[
        *("no-reason", "empty-reason", "unknown-key", "twice", "other-table"),
        *("number", "list-of-numbers", "no-toml"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, message: str):
    """The error names the entry and what it must contain."""
    with pytest.raises(ValueError, match=message):
        load_expected_failures(write(tmp_path, text))
