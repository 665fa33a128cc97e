"""Tests of the check that finds excluded words."""

import pytest

from ci.check_words import found

WORD = "whatever"


def words_in(path, text):
    path.write_text(text)
    return found(path)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("message.py", f'import sys\n\nsys.exit("use {WORD} fits")\n', 3),
        ("docstring.py", f'"""First line.\n\nTake {WORD} fits.\n"""\n', 3),
        ("page.md", f"# Page\n\n```\ncode\n```\n\nTake {WORD} fits.\n", 7),
    ],
)
def test_a_word_is_found_with_its_line(tmp_path, name, text, line):
    assert words_in(tmp_path / name, text) == [(line, WORD)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("names.py", f"{WORD} = 1  # {WORD}\n"),
        ("key.py", f'value = {{"{WORD}": 1}}\n'),
        ("parameter.py", f'"""Return it.\n\nParameters\n----------\n{WORD} : int\n"""\n'),
        ("code.md", f"`{WORD}` and [a link]({WORD}.md)\n\n```\n{WORD}\n```\n"),
        ("other.md", "A number of rows has no number of blocks.\n"),
    ],
)
def test_code_links_and_parameters_are_not_searched(tmp_path, name, text):
    assert words_in(tmp_path / name, text) == []


def test_a_phrase_is_found_over_the_end_of_a_line(tmp_path):
    assert words_in(tmp_path / "page.md", f"It gets {'rid'}\nof it.\n") == [(1, "rid\nof")]
