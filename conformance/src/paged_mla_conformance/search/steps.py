"""Hypothesis draws a problem and a few steps, and shrinks a failing case."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, assume, given, reject, settings
from hypothesis import seed as use_seed
from hypothesis import strategies as st

from paged_mla_conformance.search.corpus import ASKED, check_case, save_case
from paged_mla_conformance.suite.selection.adapt_case import adapt_case
from paged_mla_conformance.suite.selection.params import unmet_by_case
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases.case import Case, Row, TableTail, Tree
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import OutOfMemory
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

REPLAY_FILE = "failing-case.json"

_BLOCK_SIZES = (16, 1, 64, 32, 3, 48, 128, 256)
_HEADS = (1, 2, 4, 3, 6, 16)
_LONGEST = 140
_MOST_QUERIES = 12
_ROPES = (None, *(Rope(p, yarn=yarn) for p in RopePairing for yarn in (None, Yarn(40.0, 64))))


@st.composite
def rows(draw: st.DrawFn) -> tuple[Row, ...]:
    """Draw the rows of one step: chunks, decode rows, padded rows and shared prefixes."""
    found: list[Row] = []
    for index in range(draw(st.integers(0, 5))):
        query_len = draw(st.integers(0, _MOST_QUERIES))
        context = draw(st.integers(0, _LONGEST - _MOST_QUERIES))
        padded = draw(st.integers(0, 7)) == 7
        shares = draw(st.none() | st.integers(0, index - 1)) if index else None
        found.append(
            Row(0, min(query_len, 3)) if padded else Row(context + query_len, query_len, shares)
        )
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a case; simple cases are preferred."""
    mask = draw(st.sampled_from(list(Mask)))
    steps = draw(st.lists(rows(), min_size=1, max_size=3))
    if mask is Mask.TREE:
        assume(any(row.query_len for step in steps for row in step))
    explicit_slots = draw(st.integers(0, 7)) == 7
    return Case(
        group="fuzz",
        name="drawn",
        why="found by fuzzing",
        rules=("S-17", "S-19"),
        rows=steps[0],
        then=tuple(steps[1:]),
        num_heads=draw(st.sampled_from(_HEADS)),
        block_size=draw(st.sampled_from(_BLOCK_SIZES)),
        mask=mask,
        mask_spelling=draw(st.sampled_from(list(MaskSpelling))),
        tree=draw(st.sampled_from(list(Tree))),
        rope=draw(st.sampled_from(_ROPES)),
        padded_tokens=draw(st.integers(0, 5)),
        query_scale=draw(st.sampled_from((1.0, 1e-3, 1e3))),
        softmax_scale=draw(st.sampled_from((None, 0.3))),
        table_tail=draw(st.sampled_from(list(TableTail))),
        table_width=draw(st.integers(0, 4)),
        packed_padding=draw(st.sampled_from((0, 3))),
        spare=draw(st.sampled_from((1, 4))),
        token_padding=draw(st.sampled_from((0, 32))),
        block_padding=draw(st.sampled_from((0, 96))),
        strided_inputs=draw(st.booleans()),
        explicit_slots=explicit_slots,
    )


def search_cases(
    backend: Backend,
    dims: MlaDims,
    dtypes: tuple[str, ...],
    folder: Path,
    *,
    examples: int,
    seed: int,
) -> None:
    """Search for a failing case with hypothesis; raise the error of the smallest one found.

    The notes of the error contain the case and the path of its replay file.

    Parameters
    ----------
    backend : Backend
    dims : MlaDims
    dtypes : tuple of str
    folder : Path
        The folder for the replay file of a failure.
    examples : int
        The number of cases to try.
    seed : int
    """
    capabilities = backend.capabilities

    @use_seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(case=cases(), dtype=st.sampled_from(dtypes))
    def every_answer_is_right(case: Case, dtype: str) -> None:
        case, _ = adapt_case(case, capabilities)
        assume(not unmet_by_case(capabilities, case, dims, dtype, ASKED))
        try:
            check_case(backend, case, dims, dtype)
        except OutOfMemory:
            reject()  # the device has too little memory for the case
        except Exception as failure:
            path = folder / REPLAY_FILE
            save_case(case, dtype, path)
            failure.add_note(f"{case}\n{dtype}, replay file: {path}")
            raise

    every_answer_is_right()
