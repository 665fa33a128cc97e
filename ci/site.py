"""Build the documentation site of the pages that mkdocs.yml lists.

    python -m ci.site    # writes out/site/index.html

Pages stay where they are. The command copies them, and every tracked file that they link to, into a
temporary folder with the same relative paths, and runs MkDocs there. A link to a folder becomes a
link to the folder's README.md if that is a page, and plain text otherwise. A dead link and a page
that the navigation lacks are errors.
"""

from __future__ import annotations

import argparse
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ci.packages import ROOT, tracked

SITE = ROOT / "out/site"
PAGE = re.compile(r"^ *- (?:[^#\n]+: )?([\w./-]+\.md)(?: +#.*)?$", re.MULTILINE)
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
TARGET = re.compile(
    r'(?:\]\(|^\[[^\]]+\]: |(?:src|srcset|href)=")(?!\w+:|#)([^)#\s"]+)', re.MULTILINE
)


def pages_of(navigation: str) -> list[str]:
    """Return the pages that the text of a mkdocs.yml lists, in their order."""
    return PAGE.findall(navigation)


def resolved(page: str, target: str) -> str:
    """Return the path from the root that a link on a page leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def prepared(page: str, text: str, pages: Iterable[str], files: Iterable[str]) -> str:
    """Return the text of a page for the site: without links to folders.

    Parameters
    ----------
    page : str
        The path of the page from the root.
    text : str
    pages : iterable of str
        The pages of the site.
    files : iterable of str
        The tracked files.
    """
    known = set(pages)
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = resolved(page, target)
        if path not in folders:
            return match[0]
        readme = f"{path}/README.md"
        return f"[{words}]({target.rstrip('/')}/README.md{anchor})" if readme in known else words

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def linked(page: str, text: str) -> set[str]:
    """Return the paths that the links and images of a page lead to, from the root."""
    return {
        resolved(page, target) for part in FENCE.split(text)[::2] for target in TARGET.findall(part)
    }


def copy(pages: list[str], files: list[str], folder: Path) -> None:
    """Write the pages, and the tracked files that they link to, into a folder."""
    known = set(files)
    for page in pages:
        if page not in known:
            continue  # MkDocs reports it
        text = prepared(page, (ROOT / page).read_text(encoding="utf-8"), pages, files)
        write(folder / page, text.encode())
        for name in (linked(page, text) & known) - set(pages):
            write(folder / name, (ROOT / name).read_bytes())


def write(path: Path, data: bytes) -> None:
    """Write a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main(arguments: list[str]) -> int:
    """Build the site; return the exit status of MkDocs."""
    parser = argparse.ArgumentParser(prog="python -m ci.site", description=__doc__)
    parser.parse_args(arguments)
    settings = ROOT / "mkdocs.yml"
    pages = pages_of(settings.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy(pages, tracked(), folder / "pages")
        own = {"INHERIT": str(settings), "docs_dir": str(folder / "pages"), "site_dir": str(SITE)}
        (folder / "mkdocs.yml").write_text(json.dumps(own), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        command += ["-f", str(folder / "mkdocs.yml")]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of 8 lines
        status = subprocess.run(command, env=environment, check=False).returncode
    if status == 0:
        print(f"{len(pages)} pages in {SITE.relative_to(ROOT)}/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
