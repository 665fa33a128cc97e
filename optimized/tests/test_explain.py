import logging
from dataclasses import replace

import pytest
import torch
from mla_step import TILES, build, config

from paged_mla_optimized import PagedMla
from paged_mla_optimized.runtime.log import LOGGER
from paged_mla_optimized.tensors.step import MlaStep

SPLITS = replace(TILES, programs_per_sm=4, split_tiles=2)


def explained(**changes):
    step = build((90, 3), (0, 2), (200, 1), (33, 1), **changes)
    mla = PagedMla(step.config, "cpu", variant=SPLITS)
    step.attend(mla)
    return mla, mla.explain(step.described)


def test_explanation_follows_the_schedule():
    """1 + 6, 1 + 13 and 1 + 3 units over 4 parts of 7, as the device counted them."""
    mla, explanation = explained()
    plan = mla._core.plan
    assert explanation.units == plan.unit_starts[plan.num_rows + 1].item() == 25
    assert (explanation.part_units, explanation.idle_parts) == (7, 0)
    assert (explanation.groups, explanation.cut_groups) == (3, 1)
    assert explanation.programs == 4
    assert "25 units (key tiles and starts) in 3 groups" in str(explanation)


def test_explanation_of_fixed_splits():
    """What is cut depends on the rows alone."""
    explanation = explained(batch_invariant=True)[1]
    assert explanation.cut_groups == 3
    assert "batch-invariant" in str(explanation)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["parts", "splits"])
def test_parts_that_only_begin_groups_are_idle(batch_invariant):
    """Their programs find no key tile in their shares."""
    step = build((90, 3), (0, 2), (5, 1), (33, 1), batch_invariant=batch_invariant)
    mla = PagedMla(step.config, "cpu", variant=replace(SPLITS, programs_per_sm=24, overhead=5))
    step.attend(mla)
    idle = sum(begin >= end for begin, end, *_ in mla._core.plan.shares.tolist())
    assert mla.explain(step.described).idle_parts == idle > 0


@pytest.mark.parametrize("num_tokens", [0, 2, 3, 4])
def test_explanation_of_a_step_that_is_cut_off(num_tokens):
    """S-17: tokens at or past T are as if they had not come, the last keys of their rows too."""
    step = build((90, 3), (65, 33))
    mla = PagedMla(step.config, "cpu", variant=SPLITS)
    lengths = step.cu_seqlens_q, step.seq_lens
    cut_off = MlaStep(*lengths, step.block_table, num_tokens=num_tokens)
    mla.plan(cut_off)
    found = mla.explain(cut_off)
    assert found.units == mla._core.plan.cut[2].item()


@pytest.mark.parametrize(
    ("starts", "seq_lens"),
    [
        ([-(2**31), 2, 3], [5, 5]),
        ([0, 3, 2], [5, 5]),
        ([0, 2**31 - 1, 2**31 - 1], [2**31 - 1, 5]),
        ([0, 2, 3], [1, 5]),
        ([0, 2, 3], [257, -5]),
    ],
)
def test_explanation_of_rows_that_no_rule_allows(starts, seq_lens):
    """S-2, S-9: they are padding in the plan, and so they are in its explanation."""
    mla = PagedMla(config(max_model_len=256), "cpu", variant=SPLITS)
    lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, seq_lens))
    step = MlaStep(*lengths, torch.zeros(2, 128, dtype=torch.int32), num_tokens=3)
    mla.plan(step)
    assert mla.explain(step).units == mla._core.plan.cut[2].item()


def test_explanation_of_a_row_that_its_table_is_too_narrow_for():
    """S-1: padding, as in the plan."""
    mla = PagedMla(config(max_model_len=256), "cpu", variant=SPLITS)
    lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 1, 2], [200, 5]))
    step = MlaStep(*lengths, torch.zeros(2, 1, dtype=torch.int32), num_tokens=2)
    mla.plan(step)
    assert mla.explain(step).units == mla._core.plan.cut[2].item()


def test_memory_account_is_complete():
    """S-9: the list has every byte of plan and workspace; outputs are not stored."""
    mla = PagedMla(config(), "cpu")
    buffers = {buffer.name: buffer.nbytes for buffer in mla.memory()}
    assert not {"out", "lse"} & set(buffers)
    assert buffers["workspace"] == 2 * 10 * 64 * (32 + 1) * 4
    assert sum(buffers[name] for name in mla._core.plan.buffers) <= mla._core.plan.state.nbytes
    assert [b.nbytes for b in mla.memory()] == sorted(buffers.values(), reverse=True)


def test_log_names_config_and_bytes(caplog):
    """An instance logs its description, once, through the standard library."""
    with caplog.at_level(logging.INFO, LOGGER.name):
        PagedMla(config(), torch.device("cpu"))
    [record] = caplog.records
    assert record.name == "paged_mla"
    assert "num_heads=4" in record.getMessage()
    assert "bytes" in record.getMessage()
