"""Untrusted texts are read in bounded time and memory; errors name the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paged_mla_shared.documents import (
    LARGEST,
    LARGEST_TOML,
    MOST_BRACKETS,
    one_line,
    parse_object,
    read_object,
    read_text,
    read_toml,
    take_version,
)
from paged_mla_shared.errors import InvalidArgument

BAD_OBJECTS = {
    "empty": ("", "Expecting value"),
    "list": ("[]", "got list"),
    "nan": ('{"a": NaN}', "NaN"),
    "infinity": ('{"a": -Infinity}', "-Infinity"),
    "overflow": ('{"a": 1e999}', "1e999"),
    "digits": ('{"a": ' + "1" * 5000 + "}", "digits"),
    "twice": ('{"a": {"b": 1, "b": 1}}', "duplicate key"),
    "deep": ('{"a": ' * 50_000, "deep"),
    "wide": ('{"a": [' + "[]," * MOST_BRACKETS + "[]]}", "brackets"),
}


@pytest.mark.parametrize(("text", "match"), BAD_OBJECTS.values(), ids=BAD_OBJECTS)
def test_a_bad_object(text: str, match: str):
    """The message has the place and the error."""
    with pytest.raises(InvalidArgument, match=match) as caught:
        parse_object(text, "log, line 3")
    assert str(caught.value).startswith("log, line 3: got ")


def test_a_good_object(tmp_path: Path):
    """Numbers, brackets in strings and empty values are read unchanged."""
    path = tmp_path / "good.json"
    path.write_text('{"a": [1, 2.5, "[NaN", {}, null]}')
    assert read_object(path) == {"a": [1, 2.5, "[NaN", {}, None]}


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "large", "latin-1"])
def test_paths_that_are_not_text_files_raise(tmp_path: Path, kind: str):
    """The reader does not wait for a pipe, and reads no more than the limit."""
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(LARGEST + 1)
    elif kind == "latin-1":
        path.write_bytes("é".encode("latin-1"))
    with pytest.raises(InvalidArgument, match=str(path)):
        read_text(path)


def test_the_largest_text_is_read(tmp_path: Path):
    """The limit itself is allowed."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(LARGEST)
    assert len(read_text(path)) == LARGEST


def test_characters_that_a_terminal_interprets_are_escaped():
    """A name from a file cannot clear the screen or print a false line; letters stay unchanged."""
    assert one_line("a\x1b[2J\nok\u202e\x9b é") == r"a\x1b[2J\nok\u202e\x9b é"


BAD_TOML = {"value": "a = ", "table": "[a", "twice": "a = 1\na = 2", "deep": "a = " + "[" * 50_000}


@pytest.mark.parametrize("text", BAD_TOML.values(), ids=BAD_TOML)
def test_bad_toml(tmp_path: Path, text: str):
    """The error names a file that is not TOML."""
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=str(path)):
        read_toml(path)


@pytest.mark.parametrize("key", ["a" + 65 * ".a", "[" + 66 * " a ." + "a]", '"\u2028".' * 66 + "a"])
def test_a_key_of_many_parts_is_refused_before_it_is_read(tmp_path: Path, key: str):
    """The memory to read it would grow with the square of its parts."""
    path = tmp_path / "keys.toml"
    path.write_text(f"b = 1\n{key} = 1\n", encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"line 2: got 6[56] dots; allowed: at most 64"):
        read_toml(path)
    path.write_text(f"{'a.' * 64}a = 1\n")
    assert list(read_toml(path)) == ["a"]


def test_a_larger_toml_file_is_refused_before_it_is_parsed(tmp_path: Path):
    """Its keys would take several hundred times its size."""
    path = tmp_path / "keys.toml"
    path.write_text("#" * LARGEST_TOML)
    assert read_toml(path) == {}
    path.write_text("#" * (LARGEST_TOML + 1))
    with pytest.raises(InvalidArgument, match=f"keys.toml: got a larger file; .* {LARGEST_TOML}"):
        read_toml(path)


@pytest.mark.parametrize("version", [2, True, 1.0, "1", None], ids=repr)
def test_another_version(version):
    """Only the same integer is accepted as the version."""
    with pytest.raises(InvalidArgument, match=r"f: version: got .+; allowed: 1"):
        take_version({"version": version}, "version", 1, "f")


def test_the_version_is_taken():
    """The version is removed from the document."""
    document = {"version": 1, "a": 2}
    take_version(document, "version", 1, "f")
    assert document == {"a": 2}
