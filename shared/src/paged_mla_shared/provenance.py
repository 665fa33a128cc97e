"""Where a report's code comes from."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit_of(source: str) -> str:
    """Return the commit that a source file stands at, "-dirty" with local changes.

    Parameters
    ----------
    source : str
        A module's ``__file__``.

    Returns
    -------
    str
        What ``PAGED_MLA_COMMIT`` says, where it is set; "not in a checkout" for a file that no
        commit tracks, as in an install inside the checkout of something else.
    """
    if said := os.environ.get("PAGED_MLA_COMMIT"):
        return said
    path = Path(source)
    try:
        _git(path.parent, "ls-files", "--error-unmatch", path.name)
        return _git(path.parent, "describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return "not in a checkout"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
