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
    return os.environ.get("PAGED_MLA_COMMIT") or commit_of_checkout(source)


def commit_of_checkout(source: str | Path) -> str:
    """Return the commit that tracks a file, of whichever project; as :func:`commit_of` spells it.

    Parameters
    ----------
    source : str or Path
        A file.

    Returns
    -------
    str
        Twelve digits, "-dirty" behind them with local changes; or "not in a checkout".
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
