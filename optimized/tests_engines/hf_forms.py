"""Which rows of a trial are absorbed and which materialized, chosen by the trial and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

ABSORBED = "paged_mla_optimized.planning.layer_cost.Forms.absorbed_rows"
FORMS = {  # how many leading rows of so many are absorbed
    "absorbed": lambda rows: rows,
    "materialized": lambda _rows: 0,
    "both": lambda rows: (rows + 1) // 2,
}
"""The cost model, whose constants are an H200's, materializes all rows of small models."""


@contextmanager
def rows_in(form: str | None, pool) -> Iterator[Counter[str]]:
    """Let rows of a pool's steps be attended to in a form; yield how many were in each.

    ``None`` leaves the choice to the cost model. The rows of the largest step are counted too.
    """
    counts: Counter[str] = Counter()
    plan = pool.mla.plan

    def counting(step):
        planned = plan(step)
        absorbed = pool.mla.absorbed_rows
        for row, length in enumerate(step.query_lens):
            if length > 0:
                counts["absorbed" if row < absorbed else "materialized"] += 1
        counts["largest"] = max(counts["largest"], len(step.query_lens))
        return planned

    with patch.object(pool.mla, "plan", counting):
        if form is None:
            yield counts
        else:
            choose = FORMS[form]
            with patch(ABSORBED, lambda forms: choose(len(forms.absorbed))):
                yield counts


def assert_counts(counts: Counter[str], form: str | None) -> None:
    """Hold what was counted against what a form promises; a step of one row has one form alone."""
    absorbed, materialized = counts["absorbed"], counts["materialized"]
    assert absorbed + materialized > 0
    if form is not None:
        assert (absorbed > 0) == (form != "materialized"), counts
        has_others = form == "materialized" or (form == "both" and counts["largest"] > 1)
        assert (materialized > 0) == has_others, counts
