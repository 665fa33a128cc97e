"""Each step of the group bounded is illegal, and the step from which it is made is legal."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_conformance.suite.trials.bounded import spoilt
from paged_mla_reference.rules.bounded import legal_rows
from paged_mla_reference.rules.materialize import materialize
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_shared.cases import CASES, IllegalCase
from paged_mla_shared.dims import SMALL
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.inputs import build_steps


@pytest.mark.parametrize("case", CASES["bounded"], ids=lambda case: case.name)
def test_validation_refuses_every_step(case: IllegalCase):
    """S-1, S-2, S-10, S-14: validation accepts the legal step and refuses the changed one."""
    [step] = build_steps(case, SMALL, "float32")
    good, _ = materialize(step)
    validate_batch(step.problem, good)
    given = spoilt(case, step.problem, good)
    with pytest.raises(InvalidArgument):
        validate_batch(step.problem, given)
    served = legal_rows(step.problem, given)
    changed = case.starts or case.lengths or case.elements is not None or case.columns is not None
    assert not changed or not served.all() or case.name in {"starts-late", "starts-past-the-tokens"}


def test_a_mask_has_the_columns_of_its_rows():
    """S-14: the elements of the rows after a shorter row directly follow its elements."""
    [case] = [case for case in CASES["bounded"] if case.name == "tree-full-short"]
    [step] = build_steps(case, SMALL, "float32")
    good, _ = materialize(step)
    given = spoilt(case, step.problem, good)
    assert good.mask is not None
    assert given.mask is not None
    assert len(given.mask) == len(good.mask) - 10 * 6
    behind = 5 + 3 * 33  # elements of the last two rows
    assert np.array_equal(given.mask[-behind:], good.mask[-behind:])
