"""Which releases of an engine its classes are given to: no engine here."""


def serves(version: str, oldest: tuple[int, ...]) -> bool:
    """Return whether a version is `oldest` or later.

    What somebody built, ``0.1.dev7+g1a2b3c4`` where no tag was found, is taken for new.
    """
    parts = version.split("+", maxsplit=1)[0].split(".")
    numbers = parts[: len(oldest)]
    is_release = all(part.isdigit() for part in numbers) and "dev" not in version
    return not is_release or tuple(map(int, numbers)) >= oldest
