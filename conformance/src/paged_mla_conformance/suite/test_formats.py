"""Cache formats with scales: what is written, what is read, what is written again (S-11)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.trial import Trial

pytestmark = pytest.mark.mla(group="formats", ops=("append", "attend"), rules=("S-10", "S-11"))


@pytest.mark.mla(group="formats", ops=("append",), rules=("S-10", "S-11"))
def test_written(trial: Trial) -> None:
    """S-10: every byte of rows and scales."""
    trial.check_append()


@pytest.mark.mla(group="formats", ops=("append",), features=("replay",), rules=("S-10", "S-11"))
def test_written_again(trial: Trial) -> None:
    """S-10, S-11: drafts past the first of each row run again, as other tokens."""
    trial.check_append_again()


def test_read(trial: Trial) -> None:
    """S-5: the answer is that of the bytes, whoever wrote them."""
    trial.check_attention()


@pytest.mark.mla(group="formats", ops=("gather_context",), rules=("S-11",))
def test_gathered(trial: Trial) -> None:
    """S-11: each value rounded to float32, then to the model's type."""
    trial.check_gather()
