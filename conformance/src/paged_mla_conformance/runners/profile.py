"""Profiles: the conventions of a backend for steps and outputs, and what a backend must declare.

A profile is a TOML file in ``profiles`` or a file of the user. ``strict`` follows the rules of the
specification; every other profile lists only the differences.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from paged_mla_shared.documents import read_toml
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.typed import build

FOLDER = Path(__file__).with_name("profiles")
STRICT = "strict"

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "unread": ("poison", "stale"),
    "padded_seq_len": (0, 1),
    "padded_slot": (-1, 0),
    "empty_rows": ("judged", "ignored"),
    "empty_lse": (-float("inf"), float("inf")),
    "lse": ("natural", "base 2", "none"),
    "lse_layout": ("[T, H]", "[H, T]"),
    "merge_lse_layout": ("[T, H]", "[H, T]"),
    "undeclared": ("fails", "skips"),
}


@dataclass(frozen=True)
class Profile:
    """The values of a profile. ``profiles/strict.toml`` explains every key.

    Parameters
    ----------
    name : str
        The names or paths of the files from which the profile was read, separated by commas.
    table_fill : int or "poison"
        The table entries after the blocks of a row.
    left_out : tuple of str
        Groups, or ids of cases, that are skipped.
    """

    name: str
    unread: str
    table_fill: int | str
    padded_seq_len: int
    padded_slot: int
    reserved_block: bool
    empty_rows: str
    empty_lse: float
    lse: str
    lse_layout: str
    merge_lse_layout: str
    left_out: tuple[str, ...]
    undeclared: str

    def __post_init__(self) -> None:
        """Check the values.

        Raises
        ------
        InvalidArgument
            A key has a value that is not allowed, or padding needs block 0 and it is not reserved.
        """
        for key, words in _ALLOWED.items():
            if getattr(self, key) not in words:
                allowed = " or ".join(map(repr, words))
                raise InvalidArgument(key, repr(getattr(self, key)), allowed)
        fill = self.table_fill
        if fill != "poison" and not (isinstance(fill, int) and -(2**31) <= fill < 2**31):
            raise InvalidArgument("table_fill", repr(fill), "'poison' or an integer of 32 bits")
        if (self.padded_seq_len or self.padded_slot == 0) and not self.reserved_block:
            raise InvalidArgument("reserved_block", "false", "true, because padding uses block 0")

    @property
    def as_written(self) -> bool:
        """Whether the profile has the conventions of the rules, so that nothing is translated."""
        strict = load_profile(STRICT)
        left_out, undeclared = strict.left_out, strict.undeclared
        return replace(self, name=STRICT, left_out=left_out, undeclared=undeclared) == strict


def load_profile(names: str) -> Profile:
    """Return the profile of a list of files.

    Parameters
    ----------
    names : str
        Names of files in ``profiles``, or paths, separated by commas. The values of a later file
        replace those of an earlier one, and all of them replace those of ``strict``.

    Raises
    ------
    InvalidArgument
        A file is missing or is not TOML, or it has an unknown key or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    allowed = [field.name for field in fields(Profile) if field.name != "name"]
    for name in dict.fromkeys([STRICT, *names.split(",")]):
        own = FOLDER / f"{name}.toml"
        if not own.exists() and not Path(name).exists():
            known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))
            raise InvalidArgument("profile", repr(name), f"{known}, or a TOML file")
        found = read_toml(own if own.exists() else Path(name))
        if unknown := found.keys() - set(allowed):
            given = f"an unknown key {min(unknown)!r}"
            raise InvalidArgument(f"profile {name}", given, ", ".join(allowed))
        values |= found
    profile: Profile = build(Profile, values | {"name": names}, f"profile {names}")
    return profile
