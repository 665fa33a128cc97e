"""Profiles: how steps are presented to a backend, how its answers come, and what it owes.

A profile is data, a TOML file in ``profiles`` or one of the user's own. ``strict`` is the rules as
written; the others say where they differ.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

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
    """What ``profiles/strict.toml`` explains, key by key.

    Parameters
    ----------
    name : str
        The files it was read from, a comma between two.
    table_fill : int or "poison"
    left_out : tuple of str
        Groups, or ids of cases, that are not asked.
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

    @property
    def as_written(self) -> bool:
        """Whether backends are spoken to in the rules' own terms."""
        strict = load_profile(STRICT)
        left_out, undeclared = strict.left_out, strict.undeclared
        return replace(self, name=STRICT, left_out=left_out, undeclared=undeclared) == strict


def load_profile(names: str) -> Profile:
    """Return the profile of `names`: files in ``profiles`` or paths, a later one over the earlier.

    Raises
    ------
    ValueError
        A file is missing or no TOML, or says something that no profile can say.
    """
    values: dict[str, Any] = {}
    for name in dict.fromkeys([STRICT, *names.split(",")]):
        path = FOLDER / f"{name}.toml"
        try:
            found = tomllib.loads((path if path.exists() else Path(name)).read_text())
        except OSError as error:
            known = sorted(file.stem for file in FOLDER.glob("*.toml"))
            raise ValueError(f"profile: got {name!r}; allowed: {known} or a file") from error
        unknown = set(found) - {field.name for field in fields(Profile)} | set(found) & {"name"}
        if unknown:
            raise ValueError(f"profile {name}: unknown keys {sorted(unknown)}")
        values |= found
    left_out = tuple(values.pop("left_out"))
    profile = Profile(name=names, left_out=left_out, **values)
    _check(profile)
    return profile


def _check(profile: Profile) -> None:
    values = asdict(profile)
    for key, allowed in _ALLOWED.items():
        if values[key] not in allowed:
            raise ValueError(
                f"profile {profile.name}: {key} got {values[key]!r}; allowed: {allowed}"
            )
    if profile.table_fill != "poison" and not isinstance(profile.table_fill, int):
        raise ValueError(f"profile {profile.name}: table_fill got {profile.table_fill!r}")
    if (profile.padded_seq_len or profile.padded_slot == 0) and not profile.reserved_block:
        raise ValueError(f"profile {profile.name}: padding lies in block 0: reserved_block = true")
