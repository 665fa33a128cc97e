"""The reference through the protocol the conformance suite uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import SCALE, causal, loops, problem_of, request, scene

from paged_mla_reference.backend import create
from paged_mla_shared.dims import DEEPSEEK_V3
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Output, Problem

SMALL_R = replace(problem_of().dims, kv_lora_rank=16, qk_rope_head_dim=8)


def _runner(**changes):
    return create().prepare(problem_of(dims=SMALL_R, **changes))


def _step(seed, length=7, context=4):
    one = request(length, seed, dims=SMALL_R)
    made = scene([request(length, seed)], [context])
    new = one.cut(context, length)
    return one, replace(made.batch, **vars(new))


def _fill(runner, one, batch):
    """Append a request's first tokens as a prompt of their own."""
    context = len(one) - len(batch.ckv)
    prompt = replace(
        batch,
        **vars(one.cut(0, context)),
        seq_lens=np.array([context], np.int32),
        cu_seqlens_q=np.array([0, context], np.int32),
    )
    runner.append(prompt)


def test_identity():
    """Reports name the reference and how it ran."""
    backend = create()
    assert (backend.name, backend.mode, backend.device) == ("paged-mla-reference", "cpu", "NumPy")
    assert backend.version == "0.1.0"


def test_a_step():
    """S-3, S-5, S-10: plan, append and attend, against plain loops."""
    one, batch = _step(1)
    runner = _runner()
    _fill(runner, one, batch)
    assert runner.plan(batch).positions.tolist() == [4, 5, 6]
    runner.append(batch)
    output = runner.attend(batch)
    out, lse = loops(one, range(4, 7), causal, SCALE)
    assert (output.out.dtype, output.lse.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(output.out, out, atol=1e-5)
    np.testing.assert_allclose(output.lse, lse, atol=1e-5)
    ckv, k_pe = runner.gather_context(batch)
    assert ckv.tolist() == one.ckv.tolist()
    assert k_pe.tolist() == one.k_pe.tolist()


def test_a_second_step_is_as_the_first():
    """S-17: after a longer step on the same runner, a shorter one has the bits of a fresh one."""
    used, fresh = _runner(), _runner()
    for seed, length in ((1, 20), (2, 6)):
        one, batch = _step(seed, length, length - 2)
        _fill(used, one, batch)
        used.append(batch)
        last = used.attend(batch)
    _fill(fresh, one, batch)
    fresh.append(batch)
    again = fresh.attend(batch)
    assert last.out.tobytes() == again.out.tobytes()
    assert last.lse.tobytes() == again.lse.tobytes()


def test_a_loaded_cache_is_read_back():
    """S-9: every byte is equal, also in blocks that the image does not list."""
    runner = _runner(num_blocks=10)
    made = scene([request(7, 1)], [4])
    layout = problem_of(dims=SMALL_R, num_blocks=10).layout
    blocks = np.arange(2 * layout.block_stride).astype(np.uint8).reshape(2, -1)
    image = replace(
        made.image,
        layout=layout,
        block_ids=np.array([7, 3]),
        blocks=blocks,
        poison=np.array([1, 2], np.uint8),
    )
    runner.load_cache(image)
    found = runner.read_cache(np.array([3, 5, 7]))
    assert found[0].tolist() == blocks[1].tolist()
    assert found[1].tolist() == [1, 2] * (layout.block_stride // 2)
    assert found[2].tolist() == blocks[0].tolist()


@pytest.mark.parametrize("call", ["plan", "append", "attend", "gather_context"])
def test_a_bad_batch_is_refused_before_anything_is_written(call):
    """S-2, S-10: the cache keeps its bytes and the runner its use."""
    one, batch = _step(1)
    runner = _runner()
    _fill(runner, one, batch)
    before = runner.read_cache(np.arange(40))
    bad = replace(batch, seq_lens=np.array([2], np.int32))
    with pytest.raises(InvalidArgument, match="seq_lens"):
        getattr(runner, call)(bad)
    assert runner.read_cache(np.arange(40)).tobytes() == before.tobytes()
    runner.plan(batch)


def test_merge():
    """S-8: through the protocol."""
    one = Output(np.ones((1, 1, 1), np.float32), np.zeros((1, 1), np.float32))
    assert _runner().merge([one, one]).lse[0, 0] == pytest.approx(np.log(2))


def test_formats_that_are_not_declared():
    """S-11: a legal format without an implementation is unsupported, not wrong."""
    plain = replace(create().capabilities, cache_formats=frozenset({"fp32"}))
    problem = problem_of(dims=DEEPSEEK_V3, cache_format="fp8_ds_mla")
    with pytest.raises(Unsupported, match="fp8_ds_mla"):
        replace(create(), capabilities=plain).prepare(problem)


def test_an_illegal_problem_is_rejected():
    """S-5: refused when the runner is prepared."""
    with pytest.raises(InvalidArgument, match="softmax_scale"):
        create().prepare(problem_of(softmax_scale=0.0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_outputs_have_the_problem_dtype(dtype):
    """S-5, S-7: out in the dtype, lse in float32."""
    problem: Problem = problem_of(dims=SMALL_R, dtype=dtype)
    formats = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    runner = create().prepare(replace(problem, cache_format=formats[dtype]))
    one = request(3, 1, dtype, SMALL_R)
    made = scene([request(3, 1)], [0])
    batch = replace(made.batch, **vars(one))
    runner.append(batch)
    output = runner.attend(batch)
    assert (output.out.dtype, output.lse.dtype) == (numpy_dtype(dtype), np.float32)


def test_an_unchecked_runner_takes_what_no_rule_allows():
    """S-2, S-6, S-10: as padding where it is, in every call; the cache keeps its bytes."""
    one, batch = _step(1)
    short = replace(batch, seq_lens=np.array([2], np.int32))
    runner = create().prepare_unchecked(problem_of(dims=SMALL_R))
    _fill(runner, one, batch)
    before = runner.read_cache(np.arange(40))
    planned = runner.plan(short)
    assert not planned.positions.any()
    assert (planned.slot_mapping == -1).all()
    runner.append(short)
    assert runner.read_cache(np.arange(40)).tobytes() == before.tobytes()
    answer = runner.attend(short)
    assert not answer.out.any()
    assert np.isneginf(answer.lse).all()
    assert not runner.gather_context(short)[0].size


def test_an_unchecked_runner_serves_a_legal_step_as_any_other():
    """S-1, S-5, S-10: bit for bit, named slots too."""
    one, batch = _step(1)
    named = replace(batch, slot_mapping=np.arange(8, 8 + batch.num_tokens))
    for asked in (batch, named):
        answers = []
        backend = create()
        for prepare in (backend.prepare, backend.prepare_unchecked):
            runner = prepare(problem_of(dims=SMALL_R))
            _fill(runner, one, batch)
            planned = runner.plan(asked)
            runner.append(asked)
            cache, answer = runner.read_cache(np.arange(40)), runner.attend(batch)
            arrays = (planned.positions, planned.slot_mapping, cache, answer.out, answer.lse)
            answers.append([array.tobytes() for array in (*arrays, *runner.gather_context(batch))])
        assert answers[0] == answers[1]


def test_an_unchecked_runner_plans_no_slot_of_a_block_that_is_not_there():
    """S-1: such a block is treated as block 0, but its slots belong to other tokens."""
    _, batch = _step(1)
    strange = replace(batch, block_table=np.full_like(batch.block_table, -5))
    runner = create().prepare_unchecked(problem_of(dims=SMALL_R))
    planned = runner.plan(strange)
    assert (planned.slot_mapping == -1).all()
    assert planned.positions.any()
