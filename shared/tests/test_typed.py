"""JSON values are converted to dataclasses; errors name the place of a wrong value."""

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


def test_build_is_the_inverse_of_asdict():
    """Enums, tuples and nested dataclasses are restored."""
    assert build(Whole, json.loads(json.dumps(asdict(WHOLE))), "f") == WHOLE
    coloured = build(dict[Colour, Part], {"red": {"size": 1}}, "f")
    assert coloured == {Colour.RED: Part(1)}


def test_defaults_and_whole_weights():
    """Fields with defaults may be missing; an integer is accepted as a float."""
    built = build(Whole, {"name": "w", "parts": [{"size": 1, "weight": 2}], "rest": [1]}, "f")
    assert built == Whole("w", (Part(1, 2.0),), rest=[1])
    assert type(built.parts[0].weight) is float


BAD = {
    "null": ({"name": None}, "name: got None; allowed: a string"),
    "half-a-character": ({"name": "\ud800"}, "name: got '\\ud800'; allowed: a string without"),
    "no-list": ({"name": "w", "parts": "abc"}, "parts: got 'abc'; allowed: a list"),
    "inside": ({"parts": [{"size": 1}, {"size": "2"}]}, "parts[1].size: got '2'; allowed: a"),
    "refused": ({"parts": [{"size": 0}]}, "parts[0].size: got 0; allowed: >= 1"),
    "bool-for-int": (
        {"parts": [{"size": True}]},
        "parts[0].size: got True; allowed: a 64-bit integer",
    ),
    "float-for-int": (
        {"parts": [{"size": 1.0}]},
        "parts[0].size: got 1.0; allowed: a 64-bit integer",
    ),
    "huge": (
        {"parts": [{"size": 2**63}]},
        f"parts[0].size: got {2**63}; allowed: a 64-bit integer",
    ),
    "huge-float": ({"spare": {"size": 1, "weight": 10**400}}, "spare.weight: got 1000"),
    "int-for-bool": ({"on": 1}, "on: got 1; allowed: true or false"),
    "colour": ({"colour": "green"}, "colour: got 'green'; allowed: one of red, blue"),
    "colour-list": ({"colour": ["red"]}, "colour: got ['red']; allowed: one of red, blue"),
    "union": ({"mixed": 1.5}, "mixed: got 1.5; allowed: a string"),
    "pair": ({"pair": ["a"]}, "pair: got ['a']; allowed: 2 entries"),
    "pair-inside": ({"pair": ["a", "b"]}, "pair[1]: got 'b'; allowed: a 64-bit integer"),
    "key": ({"by_name": {"green": {}}}, "by_name.green: got 'green'; allowed: one of"),
    "dict": ({"by_name": []}, "by_name: got []; allowed: an object"),
    "unknown": ({"nmae": 1}, "got an unknown field 'nmae'; allowed: name, parts"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_wrong_values_raise(changes, message: str):
    """The message has the file, the place, the value and the allowed values, in one line."""
    with pytest.raises(InvalidArgument) as caught:
        build(Whole, {"name": "w", "parts": []} | changes, "f")
    assert str(caught.value).startswith(f"f: {message}")


def test_missing_fields_raise():
    """A list is not an object, and an object must have its required fields."""
    with pytest.raises(InvalidArgument, match=re.escape("f: got []; allowed: an object")):
        build(Whole, [], "f")
    with pytest.raises(InvalidArgument, match="f: parts: got no value"):
        build(Whole, {"name": "w"}, "f")


def test_messages_are_short():
    """The message fits a terminal for any value."""
    with pytest.raises(InvalidArgument) as caught:
        build(Part, {"size": ["x" * 10**6] * 100, "w" * 10**6: 1}, "f")
    assert len(str(caught.value)) < 300
