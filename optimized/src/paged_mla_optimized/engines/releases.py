"""Decide which releases of an engine an adapter supports. This file imports no engine."""

import re


def serves(version: str, oldest: tuple[int, ...]) -> bool:
    """Return whether a version is `oldest` or later; a release candidate counts as its release.

    A development version, such as ``0.1.dev7+g1a2b3c4`` from a source tree without tags, and a
    version that does not start with a number count as later.
    """
    release = re.match(r"\d+(\.\d+)*", version)
    if release is None or "dev" in version:
        return True
    return tuple(map(int, release[0].split("."))) >= oldest
