"""Check codes of 8 bits that represent NaN, in keys that a query token sees (S-11)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paged_mla_conformance.suite.selection.adapt_case import adapt_case
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.params import CaseParam, why_skip
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheImage

NAN_CODES = (0x7F, 0xFF)

_STEP = Case(
    group="formats",
    name="nan-code",
    why="a NaN in the cache appears in the outputs of the queries that see it",
    rules=("S-4", "S-11"),
    rows=(Row(257, 1), Row(5, 1)),  # the last key is alone in a tile and in a split of its row
    num_heads=2,
    block_size=16,
)


def trials(run: Run) -> list[Trial]:
    """Return a trial of two rows for every cache format of 8 bits that the backend declares."""
    case, note = adapt_case(_STEP, run.backend.capabilities)
    named = [name for name in run.formats if FORMATS[name].ckv_dtype == "float8_e4m3"]
    params = [CaseParam(replace(case, cache_format=name), run.dtypes[0], note) for name in named]
    return [
        Trial(run.backend, param.case, run.dims, param.dtype, note)
        for param in params
        if why_skip(run, param, ()) is None
    ]


def check_nan_code(trial: Trial, code: int) -> None:
    """Attend without `code`, then with `code` in the last latent of the first row.

    Raises
    ------
    Mismatch
        With the code, `out` or `lse` of row 0 is not NaN, or `out` of row 1 changes.
    """
    [stage] = trial.stages()
    runner = trial.prepare()
    runner.load_cache(stage.after)
    before = trial.attend(runner, stage)
    runner.load_cache(_with_code(stage, code))
    after = runner.attend(stage.batch)
    for what, answer in (("out", after.out[0]), ("lse", after.lse[0])):  # [H, R] and [H]
        values = answer.astype(np.float32)
        wrong = values[~np.isnan(values)]
        if wrong.size:
            detail = f"{wrong.size} of {values.size} elements that see {code:#04x}"
            detail = f"{detail} are not NaN in {trial.case.cache_format}; the first is {wrong[0]}"
            raise Mismatch("S-11", what, detail, (0,))
    if before.out[1].tobytes() != after.out[1].tobytes():
        raise Mismatch("S-4", "out", f"row 1 changed when {code:#04x} was in row 0", (1,))


def _with_code(stage: Stage, code: int) -> CacheImage:
    """Return the cache with `code` in the latent of the last token of the first row."""
    image, size = stage.after, stage.problem.block_size
    slot = int(metadata(stage.problem, stage.batch).slot_mapping[0])
    blocks = image.blocks.copy()
    codes = image.layout.field(blocks, "ckv").view(np.uint8)  # [blocks, block_size, R]
    codes[image.block_ids == slot // size, slot % size, 0] = code
    return replace(image, blocks=blocks)
