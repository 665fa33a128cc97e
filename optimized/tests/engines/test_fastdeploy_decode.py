"""Decode rows as FastDeploy hands them over, against dense attention. S-2, S-6, S-10."""

from __future__ import annotations

import pytest
import torch
from mla_step import P, R, build, config, dense

from paged_mla_optimized import PagedMla
from paged_mla_optimized.engines.fastdeploy.decode import LatentAttention, decode_lens
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing

ROWS = (  # new tokens of a prompt, cached tokens, new tokens
    (0, 36, 1),
    (5, 0, 5),  # a prompt
    (0, 61, 3),  # drafts
    (0, 99, 0),  # stopped: what was cached stays counted
    (7, 20, 7),  # a prompt behind a prefix hit
    (0, 0, 0),
)


def lens():
    return [torch.tensor(column, dtype=torch.int32) for column in zip(*ROWS, strict=True)]


def test_lengths():
    assert decode_lens(*lens()).tolist() == [37, 0, 64, 0, 0, 0]
    assert decode_lens(*lens()).dtype == torch.int32


def as_kept(column, lines=3):
    """A column with a line for every request that may run; those that do run are the first."""
    return torch.cat([column[:, None], torch.full((lines, 1), 9).int()])


@pytest.mark.parametrize("lines", [0, 3], ids=["all-run", "some-run"])
def test_lengths_as_they_are_kept(lines):
    encoder, decoder, this_time = lens()
    kept = as_kept(encoder, lines), as_kept(decoder, lines)
    assert decode_lens(*kept, this_time[:, None]).tolist() == [37, 0, 64, 0, 0, 0]
    assert decode_lens(*kept, this_time).tolist() == [37, 0, 64, 0, 0, 0]


LENGTHS = ("seq_lens_encoder", "seq_lens_decoder", "seq_lens_this_time")


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("shape", [(1, 6), (6, 2), ()], ids=["row", "wide", "number"])
def test_lengths_of_other_shapes_are_refused(name, shape):
    """S-2: torch would broadcast some of them."""
    given = dict(zip(LENGTHS, lens(), strict=True)) | {name: torch.ones(shape).int()}
    with pytest.raises(InvalidArgument, match=f"{name}: "):
        decode_lens(**given)


@pytest.mark.parametrize("name", LENGTHS[:2])
def test_fewer_lengths_than_requests_that_run_are_refused(name):
    given = dict(zip(LENGTHS, lens(), strict=True)) | {name: torch.ones(5).int()}
    with pytest.raises(InvalidArgument, match=rf"{name}: .*\[5\].* at least 6"):
        decode_lens(**given)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_lengths_of_other_dtypes_are_refused(name, dtype):
    """S-2: a conversion to int32 could lose bits."""
    given = dict(zip(LENGTHS, lens(), strict=True))
    given[name] = given[name].to(dtype)
    with pytest.raises(InvalidArgument, match=f"{name}: got {dtype}; allowed: torch.int32"):
        decode_lens(**given)


@pytest.mark.parametrize("name", LENGTHS[:2])
def test_lengths_on_another_device_are_rejected(name):
    given = dict(zip(LENGTHS, lens(), strict=True))
    given[name] = given[name].to("meta")
    with pytest.raises(InvalidArgument, match=f"{name}: got on meta; allowed: cpu"):
        decode_lens(**given)


def test_a_mixed_step():
    """Prompts get zeros, and their tokens are written by another call."""
    is_decode = [encoder == 0 and new > 0 for encoder, _, new in ROWS]
    rows = [
        (cached + new if mine else 0, new)
        for (_, cached, new), mine in zip(ROWS, is_decode, strict=True)
    ]
    step = build(*rows, padded_tokens=2, tail=-1)
    tokens = len(step.q_nope)
    owner = [row for row, (_, new) in enumerate(rows) for _ in range(new)]

    fresh = torch.full((tokens, step.cache.shape[-1]), torch.nan)
    cache = step.cache.clone()
    for token, row in enumerate(owner):
        if not is_decode[row]:
            continue
        position = rows[row][0] - rows[row][1] + token - int(step.cu_seqlens_q[row])
        block = step.block_table[row, position // step.config.block_size]
        fresh[token] = step.keys[row][position]
        cache[block, position % step.config.block_size] = torch.nan  # until it is written

    attention = LatentAttention(PagedMla(step.config, "cpu"), query_len=3)
    encoder, decoder, this_time = lens()
    attention.plan(
        as_kept(encoder),
        as_kept(decoder),
        this_time[:, None],
        as_kept(step.cu_seqlens_q)[:, 0],
        torch.cat([step.block_table, torch.full_like(step.block_table[:3], -1)]),
        num_tokens=tokens,
    )
    latent_cache = cache[:, None]
    attention.write(fresh[:, :R], fresh[:, None, R:], latent_cache)
    torch.testing.assert_close(cache, step.cache, equal_nan=True)

    q = torch.cat([step.q_nope, step.q_pe], dim=-1).flatten(1)
    out = attention.attend(q, latent_cache).view(tokens, step.config.num_heads, R)
    torch.testing.assert_close(out.double(), dense(step)[0], rtol=2e-5, atol=2e-5)
    prompts = [token for token, row in enumerate(owner) if not is_decode[row]]
    assert (out[prompts] == 0).all()


@pytest.mark.parametrize("k_pe", [torch.zeros(0, P), torch.zeros(0, 1, P)], ids=["2d", "3d"])
def test_no_tokens(k_pe):
    """S-6: without elements the widths come from the config."""
    attention = LatentAttention(PagedMla(config(), "cpu"))
    idle = torch.zeros(2, dtype=torch.int32)
    starts, table = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    attention.plan(idle, idle, idle, starts, table, num_tokens=0)
    latent_cache = torch.zeros(3, 1, 16, R + P)
    attention.write(torch.zeros(0, R), k_pe, latent_cache)
    assert not latent_cache.any()
    assert attention.attend(torch.zeros(0, 4 * (R + P)), latent_cache).shape == (0, 4 * R)
    with pytest.raises(InvalidArgument, match="q: "):
        attention.attend(torch.zeros(0, 4 * R), latent_cache)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("k_pe", (2,)), ("k_pe", (2, 2, P // 2)), ("cache", (3,)), ("cache", (3, 2, 16, R + P))],
    ids=["k_pe-line", "k_pe-heads", "cache-line", "cache-heads"],
)
def test_other_shapes_of_new_keys_are_rejected(name, shape):
    attention = LatentAttention(PagedMla(config(), "cpu"))
    zero, one = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    starts, table = torch.arange(3).int(), torch.arange(2).int()[:, None]
    attention.plan(zero, zero, one, starts, table, num_tokens=2)
    given = {"k_pe": torch.zeros(2, 1, P), "cache": torch.zeros(3, 1, 16, R + P)}
    given[name] = torch.zeros(shape)
    with pytest.raises(InvalidArgument, match=f"{name}: "):
        attention.write(torch.zeros(2, R), given["k_pe"], given["cache"])


def test_no_rope():
    """S-12: FastDeploy has rotated already."""
    mla = PagedMla(config(rope=Rope(RopePairing.NEOX)), "cpu")
    with pytest.raises(InvalidArgument, match="mla"):
        LatentAttention(mla)


def test_arguments_that_are_not_tensors_are_rejected():
    with pytest.raises(InvalidArgument, match="mla: got a str; allowed: a PagedMla"):
        LatentAttention("mla")
    attention = LatentAttention(PagedMla(config(), "cpu"))
    zero, one = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="block_tables: got None; allowed: a Tensor"):
        attention.plan(zero, zero, one, torch.arange(3).int(), None, num_tokens=2)
    with pytest.raises(InvalidArgument, match="cu_seqlens_q: got None; allowed: a Tensor"):
        attention.plan(zero, zero, one, None, torch.zeros(2, 1, dtype=torch.int32), num_tokens=2)
    with pytest.raises(InvalidArgument, match=r"block_tables: .*a tensor with 2 axes"):
        attention.plan(zero, zero, one, torch.arange(3).int(), zero, num_tokens=2)
    with pytest.raises(InvalidArgument, match="latent_cache: got None; allowed: a Tensor"):
        attention.write(torch.zeros(2, R), torch.zeros(2, P), None)
