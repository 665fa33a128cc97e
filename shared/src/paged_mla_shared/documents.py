"""JSON and TOML files that anybody may hand in, read in bounded time and memory."""

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
LARGEST_TOML = 2**20  # of which each part of a dotted key becomes half a kilobyte
MOST_DOTS = 64  # in a line of TOML: a key of n parts takes n ** 2 / 4 bytes
MOST_BRACKETS = 1 << 18  # that a JSON text opens: three bytes of it make a list of a hundred


def one_line(text: object) -> str:
    """Return a text from a file with everything spelled out that a terminal would act upon.

    Line ends, control characters and those that turn the direction of text become escapes of
    Python, so that no file can clear a screen or forge a line.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def printable(text: object) -> str:
    """Return a text of several lines as :func:`one_line` does each of them."""
    return "\n".join(map(one_line, str(text).split("\n")))


def in_script(data: Any) -> str:
    """Return data as JSON that a script of a page may hold, whatever its texts are.

    A browser reads ``</script>`` and ``<!--`` inside the script too, so that no "<" may stay.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def check_file(path: Path) -> None:
    """Refuse what is no file: nothing, a folder, a device, or a pipe, which would be waited for.

    Raises
    ------
    InvalidArgument
    """
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise InvalidArgument(str(path), error.strerror, "a file that can be read") from error
    if not regular:
        raise InvalidArgument(str(path), "no regular file", "a file")


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """Return what is in a file.

    Raises
    ------
    InvalidArgument
        It is no file, cannot be read, or has more than `largest` bytes.
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
        It cannot be read, or is not UTF-8.
    """
    try:
        return read_bytes(path, largest).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(str(path), error, "text in UTF-8") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds (:func:`parse_object`)."""
    return parse_object(read_text(path), str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the object that a JSON text holds.

    Parameters
    ----------
    text : str
    where : str
        The file it is from, and the place in it: errors begin with it.

    Raises
    ------
    InvalidArgument
        It is no JSON, no object, nested too deep or of too many parts, or it has a number that is
        not finite or a key twice.
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
        raise InvalidArgument(where, "brackets nested too deep", allowed) from error
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
        The file cannot be read (:func:`read_text`), is no TOML, has more than ``LARGEST_TOML``
        bytes, or a line of more than ``MOST_DOTS`` dots.
    """
    text = read_text(path, LARGEST_TOML)
    for number, line in enumerate(text.split("\n"), start=1):
        if (dots := line.count(".")) > MOST_DOTS:
            allowed = f"at most {MOST_DOTS} in a line"
            raise InvalidArgument(f"{path}: line {number}", f"{dots} dots", allowed)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise InvalidArgument(str(path), "brackets nested too deep", "TOML") from error
    except ValueError as error:
        raise InvalidArgument(str(path), error, "TOML") from error


def take_version(document: dict[str, Any], key: str, version: int, where: str) -> None:
    """Remove the version of its format from `document`; it must be `version`."""
    found = document.pop(key, None)
    if type(found) is not int or found != version:
        raise InvalidArgument(f"{where}: {key}", reprlib.repr(found), str(version))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text}, which is not finite")
    return number


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that an object has twice")
    return found
