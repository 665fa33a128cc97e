"""The commit of the code that wrote a report."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit_of(source: str) -> str:
    """Return the commit of a source file, with "-dirty" appended if there are local changes.

    Parameters
    ----------
    source : str
        A module's ``__file__``.

    Returns
    -------
    str
        The value of ``PAGED_MLA_COMMIT`` if it is set; "not in a checkout" for a file that no
        commit tracks, as in an install inside the checkout of another project.
    """
    return os.environ.get("PAGED_MLA_COMMIT") or commit_of_checkout(source)


def commit_of_checkout(source: str | Path) -> str:
    """Return the commit of the checkout, of any project, that tracks a file.

    Parameters
    ----------
    source : str or Path
        A file.

    Returns
    -------
    str
        Twelve digits, followed by "-dirty" if there are local changes; or "not in a checkout".
    """
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
