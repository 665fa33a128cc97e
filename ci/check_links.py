"""Check that the target of every relative link in the Markdown files exists."""

from __future__ import annotations

import re
import sys

from ci.packages import ROOT

LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )(?!https?://|#)([^)#\s]+)", re.MULTILINE)


def main() -> int:
    """Print the broken links; return 0 if there are none, otherwise 1."""
    pages = [
        page
        for page in ROOT.rglob("*.md")
        if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
    ]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
    ]
    print("\n".join(dead) or f"{len(pages)} pages, no broken link")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
