"""Tests of the documentation site; none builds it, as `nox -s site` does."""

from ci.packages import ROOT, tracked
from ci.site import linked, pages_of, prepared

NAVIGATION = """\
nav:
  - Start: README.md
  - Part:
      - a/b.md  # a page
      - a/README.md
      - Note, of rows: a/c-d.md
"""
PAGES = ["README.md", "a/README.md", "a/b.md"]
FILES = [*PAGES, "a/src/code.py", "a/picture.png"]


def test_the_navigation_has_every_tracked_page_once():
    pages = pages_of((ROOT / "mkdocs.yml").read_text())
    assert len(pages) == len(set(pages))
    hidden = {name for name in tracked() if name.startswith(".")}
    assert sorted(pages) == sorted(n for n in set(tracked()) - hidden if n.endswith(".md"))


def test_pages_are_read_with_and_without_titles():
    assert pages_of(NAVIGATION) == ["README.md", "a/b.md", "a/README.md", "a/c-d.md"]


def test_a_link_to_a_folder_becomes_its_readme_or_text():
    text = "[one](a), [`two`](a/src), [three](a/src/code.py), [four](b.md#five)\n"
    expected = "[one](a/README.md), `two`, [three](a/src/code.py), [four](b.md#five)\n"
    assert prepared("README.md", text, PAGES, FILES) == expected


def test_links_are_relative_to_their_page():
    assert prepared("a/b.md", "[one](../a/) [two](src/)", PAGES, FILES) == (
        "[one](../a/README.md) two"
    )


def test_code_is_unchanged():
    text = "```\n[one](a)\n```\n"
    assert prepared("README.md", text, PAGES, FILES) == text
    assert linked("README.md", text) == set()


def test_images_and_definitions_are_links_too():
    text = '![p](picture.png) [x](src/code.py#L3)\n\n[x]: ../README.md\n<img src="q.svg"> [w](https://e.org)'
    assert linked("a/b.md", text) == {"a/picture.png", "a/src/code.py", "README.md", "a/q.svg"}
