"""Which releases of an engine its classes are given to: no engine here."""

import re


def serves(version: str, oldest: tuple[int, ...]) -> bool:
    """Return whether a version is `oldest` or later; a candidate counts as its release.

    What somebody built, ``0.1.dev7+g1a2b3c4`` where no tag was found, is taken for new.
    """
    release = re.match(r"\d+(\.\d+)*", version)
    if release is None or "dev" in version:
        return True
    return tuple(map(int, release[0].split("."))) >= oldest
