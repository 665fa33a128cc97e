"""Read untrusted JSON and TOML files in bounded time and memory."""

from __future__ import annotations

import json
import math
import reprlib
import stat
import tomllib
from pathlib import Path
from typing import Any

from paged_mla_shared.errors import InvalidArgument

LARGEST = 16 * 2**20  # bytes of a file
LARGEST_TOML = 2**20  # bytes; each part of a dotted key takes half a kilobyte of memory
MOST_DOTS = 64  # in a line of TOML: a key of n parts takes n ** 2 / 4 bytes of memory
MOST_BRACKETS = 1 << 18  # opening brackets of a JSON text: each list takes about 100 bytes


def one_line(text: object) -> str:
    """Return a text with escapes for all characters that a terminal would interpret.

    Line ends, control characters and characters that change the direction of text become Python
    escapes, so that a file cannot clear the screen or print a false line.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def printable(text: object) -> str:
    """Return a text of several lines, each escaped as by :func:`one_line`."""
    return "\n".join(map(one_line, str(text).split("\n")))


def in_script(data: Any) -> str:
    """Return data as JSON that is safe in a script of a page, for any texts in it.

    Every "<" is escaped, because a browser interprets ``</script>`` and ``<!--`` in a script. A
    number that is not finite raises ``ValueError``.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def check_file(path: Path) -> None:
    """Check that a path is a regular file.

    Reading a pipe would wait for its writer.

    Raises
    ------
    InvalidArgument
        The path does not exist, or is a folder, a device or a pipe.
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise InvalidArgument(str(path), error.strerror, "a file that can be read") from error
    if not regular:
        raise InvalidArgument(str(path), "a folder, a device or a pipe", "a regular file")


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return the bytes of a file.

    Raises
    ------
    InvalidArgument
        The path is not a regular file, cannot be read, or has more than `largest` bytes.
    """
    check_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise InvalidArgument(str(path), error.strerror, "a file that can be read") from error
    if len(data) > largest:
        raise InvalidArgument(str(path), "a larger file", f"at most {largest} bytes")
    return data


def read_text(path: Path, largest: int = LARGEST) -> str:
    """Return the text of a file (:func:`read_bytes`).

    Raises
    ------
    InvalidArgument
        The file cannot be read, or its text is not UTF-8.
    """
    try:
        return read_bytes(path, largest).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(str(path), error, "text in UTF-8") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file (:func:`parse_object`)."""
    return parse_object(read_text(path), str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the object in a JSON text.

    Parameters
    ----------
    text : str
    where : str
        The file of the text, and the place in it; error messages begin with it.

    Raises
    ------
    InvalidArgument
        The text is not JSON or not an object, is nested too deeply or has too many brackets, or
        contains a number that is not finite, or a duplicate key.
    """
    allowed = "one JSON object"
    brackets = text.count("[") + text.count("{")
    if brackets > MOST_BRACKETS:
        raise InvalidArgument(where, f"{brackets} brackets", f"at most {MOST_BRACKETS}")
    try:
        found = json.loads(
            text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_distinct
        )
    except RecursionError as error:
        raise InvalidArgument(where, "brackets that are nested too deeply", allowed) from error
    except ValueError as error:
        raise InvalidArgument(where, error, allowed) from error
    if not isinstance(found, dict):
        raise InvalidArgument(where, type(found).__name__, allowed)
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises
    ------
    InvalidArgument
        The file cannot be read (:func:`read_text`), is not TOML, has more than ``LARGEST_TOML``
        bytes, or has a line with more than ``MOST_DOTS`` dots.
    """
    text = read_text(path, LARGEST_TOML)
    for number, line in enumerate(text.split("\n"), start=1):
        if (dots := line.count(".")) > MOST_DOTS:
            allowed = f"at most {MOST_DOTS} dots in a line"
            raise InvalidArgument(f"{path}: line {number}", f"{dots} dots", allowed)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise InvalidArgument(str(path), "brackets that are nested too deeply", "TOML") from error
    except ValueError as error:
        raise InvalidArgument(str(path), error, "TOML") from error


def take_version(document: dict[str, Any], key: str, version: int, where: str) -> None:
    """Remove the format version, which must be `version`, from `document`.

    Raises
    ------
    InvalidArgument
        The document has another version, or none.
    """
    found = document.pop(key, None)
    if type(found) is not int or found != version:
        raise InvalidArgument(f"{where}: {key}", reprlib.repr(found), str(version))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text}, which is not finite")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object with a duplicate key")
    return found
