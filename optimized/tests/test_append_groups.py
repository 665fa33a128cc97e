"""Appending where tokens of a group share a scale: S-11's rule, group by group, in plain loops."""

import pytest
import torch
from fp8_step import codes, empty_cache, scale_of, values
from mla_step import P, R, config

from paged_mla_optimized import PagedMla
from paged_mla_optimized.operations.append import launch as append
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

I32 = torch.int32
NAME = "fp8_block_group"


@pytest.fixture(params=[0, 512], ids=["windows", "tokens"], autouse=True)
def few_tokens(request, monkeypatch):
    """Let programs write several tokens each, or one."""
    monkeypatch.setattr(append, "_FEW_INTERPRETED", request.param)


in_runs = pytest.mark.parametrize("few_tokens", [0], ids=["runs"], indirect=True)


def instance(block_size=16, num_tokens=12, **changes):
    """Return an instance with a step of this many tokens, for any slots."""
    cfg = config(cache_format=NAME, block_size=block_size, max_query_tokens=128, **changes)
    mla = PagedMla(cfg, "cpu")
    cu, lens = torch.tensor([0, num_tokens], dtype=I32), torch.tensor([num_tokens], dtype=I32)
    table = torch.arange(-(-num_tokens // block_size), dtype=I32)[None]
    mla.plan(MlaStep(cu, lens, table, num_tokens=num_tokens))
    return mla


def tokens(count, seed=0, magnitude=1.0):
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** torch.linspace(-2, 2, count)[torch.randperm(count, generator=generator)]
    return torch.randn(count, R + P, generator=generator) * size[:, None] * magnitude


def append_as_specified(cache, x, slots):
    """Write tokens [n, R + P] to `slots` in place, negative ones nowhere."""
    rows, scales = cache.latents.view(-1, R + P), cache.scales.view(-1)
    size = cache.latents.shape[1] // 4
    for group in {slot // size for slot in slots if slot >= 0}:
        mine = [t for t, slot in enumerate(slots) if slot // size == group]
        first = min(slots[t] for t in mine)
        start, old = group * size, scales[group].clone()
        scale = scale_of(x[mine].flatten()[None])[0]
        if first > start and old.isfinite() and old > 0:
            scale = torch.maximum(scale, old)
            if scale > old:
                kept = rows[start:first].clone()
                rows[start:first] = codes((values(kept).float() * old) / scale)
        for t in mine:
            rows[slots[t]] = codes(x[t] / scale)
        scales[group] = scale


def assert_same_bytes(cache, other):
    assert torch.equal(cache.latents, other.latents)
    assert torch.equal(cache.scales.view(I32), other.scales.view(I32))


def check(cache, x, slots, mla=None):
    """Append to `cache` and to a copy by the rule; both must have the same bytes."""
    wanted = cache._replace(latents=cache.latents.clone(), scales=cache.scales.clone())
    append_as_specified(wanted, x, slots)
    mla = mla or instance(cache.latents.shape[1], len(x))
    mla.append(x[:, :R], x[:, R:], cache, torch.tensor(slots))
    assert_same_bytes(cache, wanted)


def test_token_by_token():
    """S-11: a group grows, and is encoded again only when its scale does."""
    cache, x = empty_cache(NAME, 2, 16), tokens(12)
    for t in range(12):
        check(cache, x[t : t + 1], [16 + t])


def test_a_prompt_at_once_and_what_follows():
    """S-11: later steps start groups, fill them up and start them again."""
    cache = empty_cache(NAME, 3, 16)
    check(cache, tokens(12), list(range(16, 28)))
    check(cache, tokens(5, seed=1, magnitude=30), list(range(26, 31)))
    check(cache, tokens(5, seed=2, magnitude=0.1), list(range(26, 31)))
    check(cache, tokens(4, seed=3, magnitude=0.01), list(range(24, 28)))


def test_slots_in_any_order():
    """S-10, S-11: mates far apart, descending, with gaps, and none before the first."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:12].tolist()
    for slots in (order, list(range(27, 15, -1)), [3, 17, 1, 18, -1, 2, 40, 19, -7, 16, 41, 43]):
        cache = empty_cache(NAME, 3, 16)
        check(cache, tokens(12, seed=4), slots)
        check(cache, tokens(12, seed=5, magnitude=8), slots)


@pytest.mark.parametrize("block_size", [4, 8, 64, 128])
def test_groups_of_one_to_many_tokens(block_size):
    """S-11: also more than a program works on together."""
    cache = empty_cache(NAME, 128 // block_size, block_size)
    slots = list(range(23, 35))
    check(cache, tokens(12), slots)
    check(cache, tokens(12, seed=1, magnitude=16), [slot + 5 for slot in slots])


def test_steps_longer_than_what_is_looked_at_together(monkeypatch):
    """S-11: mates are found on both sides of every seam."""
    monkeypatch.setattr(append, "_SLOTS", 8)
    generator = torch.Generator().manual_seed(2)
    for count in (7, 9, 18):
        cache = empty_cache(NAME, 4, 16)
        slots = torch.randperm(64, generator=generator)[:count].tolist()
        check(cache, tokens(count), slots)
        check(cache, tokens(count, seed=6, magnitude=4), sorted(slots))


@pytest.mark.parametrize("old", [0.0, -1.0, torch.inf, torch.nan, 2.0**-126, 1e30])
def test_what_an_unwritten_scale_may_hold(old):
    """S-9, S-11: a scale that is none keeps nothing; any other is one."""
    cache = empty_cache(NAME, 2, 16)
    cache.scales.fill_(old)
    check(cache, tokens(5), [18, 19, 20, 25, 26])


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_odd_numbers():
    """S-11: infinities and NaN take no part in a scale; zeros have the smallest one."""
    cache, x = empty_cache(NAME, 2, 16), tokens(8)
    x[0, ::5], x[1, ::7], x[2] = torch.inf, torch.nan, 0.0
    x[4:] = 0.0
    check(cache, x, [17, 18, 19, 20, 24, 25, 26, 27])
    check(cache, tokens(1), [28])


ROWS = ((37, 30), (21, 1), (2, 2), (36, 3), (40, 40))  # (seq_len, query_len)


def planned(*rows, padded_rows=(), block_size=64, padded_tokens=2, **changes):
    """Return an instance whose step has these rows, some of them padded, and the slots it takes."""
    tokens = sum(query_len for _, query_len in rows) + padded_tokens
    mla = instance(block_size, 1, **changes)
    cu = torch.tensor([0, *(query_len for _, query_len in rows)], dtype=I32).cumsum(0).int()
    lens = [0 if row in padded_rows else seq_len for row, (seq_len, _) in enumerate(rows)]
    width = -(-max(lens) // block_size)
    table = torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(3)).int()
    lens = torch.tensor(lens, dtype=I32)
    mla.plan(MlaStep(cu, lens, table.view(len(rows), width), num_tokens=tokens))
    return mla, mla.slot_mapping.tolist()


def check_planned(*rows, **options):
    """Append twice at a plan's slots, the second time ten times as large tokens."""
    mla, slots = planned(*rows, **options)
    reserved, block_size = mla.config.reserved_slot, mla.config.block_size
    slots = [-1 if slot == reserved else slot for slot in slots]
    cache = empty_cache(NAME, max(slots) // block_size + 1, block_size)
    wanted = cache._replace(latents=cache.latents.clone(), scales=cache.scales.clone())
    cache.scales.fill_(0.05)
    wanted.scales.fill_(0.05)
    for seed, magnitude in enumerate((1.0, 10.0)):
        x = tokens(len(slots), seed, magnitude)
        append_as_specified(wanted, x, slots)
        mla.append(x[:, :R], x[:, R:], cache)
        assert_same_bytes(cache, wanted)


@in_runs
@pytest.mark.parametrize("of_program", [1, 5, 16])
def test_planned_rows(of_program, monkeypatch):
    """S-10, S-11: groups that begin before a program's tokens, end behind them, or have one."""
    monkeypatch.setattr(append, "RUN_TOKENS", (of_program,) * 3)
    check_planned(*ROWS)


@pytest.mark.parametrize(
    ("num_tokens", "rows", "of_program"),
    [(1024, 0, 0), (1024, 1024, 1), (1536, 512, 1), (2560, 513, 3), (8192, 4, 5)],
)
def test_programs_have_more_tokens_of_longer_rows(num_tokens, rows, of_program):
    assert append.run_tokens_of(num_tokens, rows, few=False) == of_program


@in_runs
@pytest.mark.parametrize("block_size", [4, 12, 128, 256])
def test_planned_groups_of_one_to_many_tokens(block_size):
    """S-11: also more than a program writes at once, and no power of two."""
    check_planned(*ROWS, block_size=block_size)


@in_runs
def test_padded_rows_between_others():
    """S-10: their tokens write nothing, and part the tokens before from those behind."""
    check_planned(*ROWS, padded_rows=(1, 3), padded_tokens=0)


@in_runs
@pytest.mark.parametrize("place", [0, 1, 9, 29])
def test_reserved_slots(place):
    """S-10: never written, nor part of a group, be it its first token of a step, or its only one.

    What a group keeps ends below the first slot that is written.
    """
    rows = ((37, 30), (33, 1))
    _, slots = planned(*rows)
    check_planned(*rows, reserved_slot=slots[place])
    check_planned(*rows, reserved_slot=slots[30])


@pytest.mark.parametrize("pairing", list(RopePairing))
def test_keys_are_rotated_at_their_own_positions(pairing):
    """S-12: as in a cache where each token has its scale, whichever program writes them."""
    x = tokens(12)
    mla = instance(rope=Rope(pairing))
    plain = PagedMla(config(rope=Rope(pairing)), "cpu")
    plain.plan(
        MlaStep(
            torch.tensor([0, 12], dtype=I32),
            torch.tensor([12], dtype=I32),
            torch.tensor([[0]], dtype=I32),
            num_tokens=12,
        )
    )
    held = torch.zeros(1, 16, R + P)
    plain.append(x[:, :R], x[:, R:], held)
    cache = empty_cache(NAME, 1, 16)
    wanted = cache._replace(latents=cache.latents.clone(), scales=cache.scales.clone())
    append_as_specified(wanted, held[0, :12], list(range(12)))
    mla.append(x[:, :R], x[:, R:], cache)
    assert_same_bytes(cache, wanted)
