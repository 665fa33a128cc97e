"""Instances on two GPUs of one process: launches follow the tensors, not the current device."""

from dataclasses import replace

import pytest
import torch
from gpu_step import BLOCKS, CONFIG, Model, P, R, make_batch, random_lens, same, token_tensors

from paged_mla_optimized import (
    Bucket,
    DraftSteps,
    GraphedStep,
    PagedMla,
    StepInputs,
    merge_partials,
)
from paged_mla_optimized.planning.choice import demand_of, most_query_len
from paged_mla_optimized.planning.families import portable_variant
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.tensors.step import MlaStep

DECODE = replace(CONFIG, max_query_tokens=CONFIG.max_rows)
STEPS = {
    "decode": (DECODE, [(2000, 1), (0, 0), (63, 1), (700, 1)]),
    "mixed": (CONFIG, random_lens(CONFIG, 9, 60, 1)),
}


@pytest.fixture(autouse=True)
def _needs_two():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} CUDA device, needs two")


def on_both(build):
    """Return what `build` makes on each device in turn."""
    made = []
    for index in range(2):
        with torch.cuda.device(index):
            made.append(build())
    return made


@pytest.mark.parametrize("name", STEPS)
def test_interleaved_steps(name):
    """S-17: plan, append and attend interleaved, from either current device, binaries stored."""
    config, lens = STEPS[name]

    def build():
        arch = device_facts(torch.device("cuda", torch.cuda.current_device())).arch
        variant = portable_variant(demand_of(config, arch), most_query_len(config))
        batch = make_batch(config, lens, 1 + torch.cuda.current_device())
        expected = Model(PagedMla(config, variant=variant)).eager(batch)
        return Model(PagedMla(config)), batch, expected

    both = on_both(build)
    assert [model.mla.device.index for model, _, _ in both] == [0, 1]
    for current in (0, 1, 0, 1):
        with torch.cuda.device(current):
            for model, batch, _ in both:
                model.restore(batch)
            for model, batch, _ in both:
                model.plan(batch, batch.num_tokens)
            answers = [model.layers(batch) for model, batch, _ in both]
            assert torch.cuda.current_device() == current
        for (model, _, expected), (out, lse) in zip(both, answers, strict=True):
            torch.testing.assert_close(out.float(), expected[0].float(), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse, expected[1], rtol=2e-2, atol=2e-2)
            assert torch.equal(model.caches.view(torch.int16), expected[2])


def test_graphs():
    """S-17: captured and replayed while the other device is the current one."""

    def build():
        batch = make_batch(CONFIG, random_lens(CONFIG, 9, 60, 1), 1)
        model = Model(PagedMla(CONFIG))
        return model, batch, model.eager(batch), StepInputs(CONFIG, "cuda", token_tensors(CONFIG))

    both = on_both(build)
    for current in range(2):
        model, batch, expected, inputs = both[1 - current]
        with torch.cuda.device(current):
            step = GraphedStep([model.mla], model.layers, inputs, [Bucket(64, 16)])
            model.restore(batch)
            batch.load(inputs)
            out, lse = step.replay(batch.rows, batch.num_tokens)
        assert same(out[:, : batch.num_tokens], expected[0])
        assert same(lse[:, : batch.num_tokens], expected[1])
        assert torch.equal(model.caches.view(torch.int16), expected[2])


def test_other_launches():
    """S-8, S-9, S-15: merging, gathering and drafts give the same bits on both devices."""
    batch = make_batch(CONFIG, [(1000, 1), (63, 2)], 1)
    generator = torch.Generator().manual_seed(0)
    outs, lses = (torch.randn(3, 5, 16, *last, generator=generator) for last in ((R,), ()))
    cache = torch.randn(BLOCKS, 64, R + P, generator=generator).bfloat16()
    answers = []
    for index in range(2):
        device = torch.device("cuda", index)
        lengths = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
        cu_seqlens_q, seq_lens, block_table = (tensor.to(device) for tensor in lengths)
        mla = PagedMla(CONFIG, device)
        mla.plan(MlaStep(cu_seqlens_q, seq_lens, block_table, num_tokens=3))
        mine = cache.to(device)
        found = [torch.zeros(1066, width, dtype=CONFIG.dtype, device=device) for width in (R, P)]
        mla.gather_context(mine, *found)
        drafts = DraftSteps(
            max_requests=2, branches=2, steps=3, prefix_width=block_table.shape[1], own_width=2,
            block_size=64, device=device,
        )  # fmt: skip
        blocks = torch.arange(BLOCKS - 8, BLOCKS, dtype=torch.int32, device=device).view(2, 2, 2)
        drafts.fill(seq_lens, block_table, blocks)
        drafts.copy_tails(mine, seq_lens, block_table, blocks)
        merged = merge_partials(outs.to(device), lses.to(device))
        found += [*merged, mine, drafts.seq_lens, drafts.block_table]
        answers.append([tensor.cpu() for tensor in found])
    for first, second in zip(*answers, strict=True):
        assert torch.equal(first, second)
