"""Draws for ``StepInputs.load``: a step is copied unchanged, the rest of the inputs is padding."""

from __future__ import annotations

import torch
from caches import NUM_BLOCKS
from drawn_steps import SPOILT, can_be, legal, spoil_fields
from hypothesis import strategies as st
from machine import DEVICE, FILLINGS, SETUPS, mla_of, new_guards, watched
from steps import Step, Trial
from values import Draw

from paged_mla_optimized import Bucket, StepInputs
from paged_mla_optimized.tensors.step import MlaStep

_VALUES = ("cu_seqlens_q", "seq_lens", "block_table", "slot_mapping")
READS = {
    "load": {
        value: tuple(kind for name, kind in SPOILT if name == value)
        for value in _VALUES
    }
}  # fmt: skip
_NAMES = [name for name, setup in SETUPS.items() if can_be("block_table", "zero", setup.config)]


class Load(Step):
    """A step that is loaded into fixed tensors and planned from them."""


@st.composite
def loads(draw: Draw, first: tuple[str, str]) -> Load:
    """Draw a step with a block table that is invalid in the `first` way and in up to two others."""
    name = draw(st.sampled_from(_NAMES))
    ways = [pair for pair in SPOILT if pair[0] in _VALUES]
    more = draw(st.lists(st.sampled_from(ways), max_size=2))
    return Load(**vars(spoil_fields(draw, legal(draw, name), [first, *more])))


def hold(load: Load) -> None:
    """Load a step over another step, and check that legal rows keep their slots."""
    config, rows, tokens = SETUPS[load.config].config, len(load.seq_lens), load.num_tokens
    trial = Trial(load)
    guards = new_guards()
    if trial.mask is not None and config.mask != "tree:packed":
        columns = config.max_model_len if config.mask == "tree:full" else config.max_draft_tokens
        if len(trial.mask) > config.max_query_tokens * columns:
            return  # the mask does not fit; that of a step of legal rows always fits
    inputs = StepInputs(config, DEVICE, {"slots": ((config.max_query_tokens,), torch.int64)})
    inputs.poison()
    inputs.block_table.fill_(NUM_BLOCKS - 1)  # blocks of another request, from an earlier step
    table = trial.table(guards, FILLINGS[0])
    mask = None if trial.mask is None else guards.place("mask", trial.mask)
    lengths = trial.lengths(guards)
    given = load.slots if load.slots is not None else (-1,) * tokens
    slots = guards.place("slots", torch.tensor(given, dtype=torch.int64))
    guards.fill(FILLINGS[0])
    step = MlaStep(*lengths, table, num_tokens=tokens, mask=mask)
    inputs.load(step, {"slots": slots})
    guards.check()
    padded = config.max_rows - rows
    last = load.cu_seqlens_q[-1]
    assert inputs.cu_seqlens_q.tolist() == [*load.cu_seqlens_q, *[last] * padded], "cu_seqlens_q"
    longest = table.shape[1] * config.block_size
    longest = longest if longest < config.max_model_len else max(load.seq_lens, default=0)
    lens = [0 if length > longest else length for length in load.seq_lens]
    assert inputs.seq_lens.tolist() == [*lens, *[0] * padded], "seq_lens"
    loaded = inputs.block_table[:rows, : table.shape[1]]
    assert torch.equal(loaded, table), "block_table"
    rest = [-1] * (config.max_query_tokens - tokens)
    assert inputs.tokens["slots"].tolist() == [*given, *rest], "slots"
    if max(load.cu_seqlens_q) > tokens or config.is_tree:
        return  # the bucket contains tokens that the step cut off
    bucket = Bucket(config.max_query_tokens, config.max_rows)
    view, mla = inputs.view(bucket), mla_of(load.config)
    with watched():
        mla.plan(view.step)
    found = mla.slot_mapping.tolist()
    own = {t: s for row in trial.rows for t, s in zip(row.tokens, trial.slots_of(row), strict=True)}
    for token, slot in own.items():
        is_right = found[token] < 0 if slot is None else found[token] == slot
        assert is_right, f"slot {found[token]} of token {token}; expected {slot}"
