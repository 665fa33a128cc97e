"""Every relative link in the Markdown files leads somewhere."""

from __future__ import annotations

import re
import sys

from ci.packages import ROOT

LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: )(?!https?://|#)([^)#\s]+)", re.MULTILINE)


def main() -> int:
    """Return 0 when no link is dead."""
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
    print("\n".join(dead) or f"{len(pages)} pages, no dead link")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
