"""Plain values become dataclasses, and what does not fit is named by its place."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import pytest

from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.typed import build


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    size: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidArgument("size", self.size, ">= 1")


@dataclass(frozen=True)
class Whole:
    name: str
    parts: tuple[Part, ...]
    colour: Colour = Colour.RED
    spare: Part | None = None
    on: bool = False
    mixed: int | str = 0
    pair: tuple[str, int] = ("a", 1)
    by_name: dict[Colour, Part] | None = None
    rest: Any = None


WHOLE = Whole("w", (Part(1), Part(2, 3.0)), Colour.BLUE, Part(4), True, "x", ("b", 2))  # noqa: FBT003


def test_what_asdict_takes_apart_is_put_together():
    """Enums, tuples and nested dataclasses come back."""
    assert build(Whole, json.loads(json.dumps(asdict(WHOLE))), "f") == WHOLE
    coloured = build(dict[Colour, Part], {"red": {"size": 1}}, "f")
    assert coloured == {Colour.RED: Part(1)}


def test_defaults_and_whole_weights():
    """What has a default may be missing; a whole number is a number."""
    built = build(Whole, {"name": "w", "parts": [{"size": 1, "weight": 2}], "rest": [1]}, "f")
    assert built == Whole("w", (Part(1, 2.0),), rest=[1])
    assert type(built.parts[0].weight) is float


BAD = {
    "null": ({"name": None}, "name: got None; allowed: a string"),
    "half-a-character": ({"name": "\ud800"}, "name: got '\\ud800'; allowed: a string without"),
    "no-list": ({"name": "w", "parts": "abc"}, "parts: got 'abc'; allowed: a list"),
    "inside": ({"parts": [{"size": 1}, {"size": "2"}]}, "parts[1].size: got '2'; allowed: an"),
    "refused": ({"parts": [{"size": 0}]}, "parts[0].size: got 0; allowed: >= 1"),
    "bool-for-int": ({"parts": [{"size": True}]}, "parts[0].size: got True; allowed: an integer"),
    "float-for-int": ({"parts": [{"size": 1.0}]}, "parts[0].size: got 1.0; allowed: an integer"),
    "huge": ({"parts": [{"size": 2**63}]}, f"parts[0].size: got {2**63}; allowed: an integer of"),
    "huge-float": ({"spare": {"size": 1, "weight": 10**400}}, "spare.weight: got 1000"),
    "int-for-bool": ({"on": 1}, "on: got 1; allowed: true or false"),
    "colour": ({"colour": "green"}, "colour: got 'green'; allowed: one of red, blue"),
    "colour-list": ({"colour": ["red"]}, "colour: got ['red']; allowed: one of red, blue"),
    "union": ({"mixed": 1.5}, "mixed: got 1.5; allowed: a string"),
    "pair": ({"pair": ["a"]}, "pair: got ['a']; allowed: 2 entries"),
    "pair-inside": ({"pair": ["a", "b"]}, "pair[1]: got 'b'; allowed: an integer"),
    "key": ({"by_name": {"green": {}}}, "by_name.green: got 'green'; allowed: one of"),
    "dict": ({"by_name": []}, "by_name: got []; allowed: an object"),
    "unknown": ({"nmae": 1}, "got an unknown field 'nmae'; allowed: name, parts"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit(changes, message: str):
    """File, place, value and what is allowed, in one line."""
    with pytest.raises(InvalidArgument) as caught:
        build(Whole, {"name": "w", "parts": []} | changes, "f")
    assert str(caught.value).startswith(f"f: {message}")


def test_what_is_not_there():
    """A list is no object, and an object lacks what is required."""
    with pytest.raises(InvalidArgument, match=re.escape("f: got []; allowed: an object")):
        build(Whole, [], "f")
    with pytest.raises(InvalidArgument, match="f: parts: got nothing"):
        build(Whole, {"name": "w"}, "f")


def test_messages_are_short():
    """A line of a terminal, whatever the value."""
    with pytest.raises(InvalidArgument) as caught:
        build(Part, {"size": ["x" * 10**6] * 100, "w" * 10**6: 1}, "f")
    assert len(str(caught.value)) < 300
