"""The declarations of operations agree with their methods."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from typing import get_origin

import numpy as np
import pytest

from paged_mla_shared.backend import OPERATIONS, Runner, ops_of
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.problem import Batch, Metadata


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_declaration_is_that_of_the_method(name: str):
    """The types in the declaration are those of the method's annotations."""
    operation, method = OPERATIONS[name], getattr(Runner, name)
    hints = typing.get_type_hints(method)
    returned = hints.pop("return")
    first, *_ = hints.values()
    assert operation.name == name
    assert operation.takes is (get_origin(first) or first)
    assert operation.returns is (
        None if returned is type(None) else get_origin(returned) or returned
    )
    fields = getattr(operation.returns, "__dataclass_fields__", None)
    assert fields is None or [*fields] == [*operation.arrays]


def test_operations_are_all_that_is_not_the_cache():
    """No wrapper would forward a method without a declaration."""
    methods = {name for name, _ in inspect.getmembers(Runner, inspect.isfunction)}
    public = {name for name in methods if not name.startswith("_")}
    assert {*OPERATIONS} == public - {"load_cache", "read_cache"}


def test_a_runner_declares_only_its_own_methods():
    """The runner may inherit from the protocol, or only have its methods."""

    class Inherits(Runner):
        def load_cache(self, image: object) -> None:
            """Take none."""

        def read_cache(self, block_ids: object) -> typing.Any:
            """Return none."""

        def plan(self, _batch: Batch) -> Metadata:
            return Metadata(np.zeros(0, np.int64), np.zeros(0, np.int64))

    class Looks:
        def merge(self, partials: Sequence[object]) -> object:
            return partials[0]

    assert ops_of(Inherits) == {"plan"}
    assert ops_of(Looks) == {"merge"}
    with pytest.raises(Unsupported, match="merge of 0 partials is not declared"):
        Inherits().merge([])
