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
        Outside a checkout what ``PAGED_MLA_COMMIT`` says, or "unknown".
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, cwd=Path(source).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("PAGED_MLA_COMMIT", "unknown")
    return done.stdout.strip()
