"""Draws for ``ContextParallelMla``: the shard of each rank, and all operations of one rank."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from caches import NUM_BLOCKS, bits_of_slots, new_cache, rows_of_slots
from drawn_steps import OF_STEPS, legal, spoil_fields
from hypothesis import strategies as st
from machine import DEVICE, FILLINGS, ON_GPU, SETUPS, as_bits, new_guards, watched
from rows import dense, legal_rows, visible
from steps import Step, Trial
from values import Draw

from paged_mla_optimized import MlaConfig
from paged_mla_optimized.operations.shard.launch import Shard
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_optimized.tensors.step import MlaStep

I32 = torch.int32
READS = {"shard": OF_STEPS, "append of a rank": OF_STEPS, "attend of a rank": OF_STEPS}
_SETUP = "few" if ON_GPU else "causal"


@dataclass(frozen=True)
class Rank:
    """A step of a group and one of its ranks; `block_size` is that of one rank."""

    step: Step
    world: int
    rank: int
    interleave: int


@st.composite
def ranks(draw: Draw, first: tuple[str, str]) -> Rank:
    """Draw a step that is invalid in the `first` way, for one of up to three ranks."""
    world = draw(st.sampled_from([1, 2, 1, 3]))  # a group of one rank also appends and attends
    interleave = draw(st.sampled_from([1, 2, SETUPS[_SETUP].config.block_size]))
    ways = [(value, kind) for value, kinds in OF_STEPS.items() for kind in kinds]
    more = draw(st.lists(st.sampled_from(ways), max_size=2))
    step = spoil_fields(draw, legal(draw, _SETUP), [first, *more])
    step = replace(step, slots=None, scale=None, max_query_len=None, lines=0)
    return Rank(step, world, draw(st.integers(0, world - 1)), interleave)


def launches(rank: Rank) -> list[str]:
    """Return the launches of a draw."""
    return [*READS] if rank.world == 1 else ["shard"]


def hold(rank: Rank) -> None:
    """Check the shard of a rank; for a group of one rank also its writes and outputs."""
    _hold_shard(rank)
    if rank.world == 1:
        _hold_alone(rank)


def _local_len(seq_len: int, rank: Rank) -> int:
    """Return how many of a row's first `seq_len` tokens a rank has."""
    owners = ((position // rank.interleave) % rank.world for position in range(seq_len))
    return sum(owner == rank.rank for owner in owners)


def _hold_shard(rank: Rank) -> None:
    step, config = rank.step, SETUPS[rank.step.config].config
    size, tokens = config.block_size, step.num_tokens
    if not tokens:
        return
    width = len(step.table[0]) if step.table else 0
    rows = legal_rows(
        config,
        step.cu_seqlens_q,
        step.seq_lens,
        step.table,
        num_tokens=tokens,
        columns=width * size * rank.world,
    )
    room = -(-_local_len(config.max_model_len, replace(rank, rank=0)) // size)
    positions, lens = [0] * tokens, [0] * tokens
    slots: list[int | None] = [-1] * tokens
    tables: list[list[int]] = [[] for _ in range(tokens)]
    for row in rows:
        for index, token in enumerate(row.tokens):
            position = positions[token] = row.key_of(index)
            seen = lens[token] = _local_len(position + 1, rank)
            tables[token] = [*step.table[row.number][: -(-seen // size)]]
            if (position // rank.interleave) % rank.world == rank.rank:
                block = step.table[row.number][(seen - 1) // size]
                slots[token] = block * size + (seen - 1) % size if block >= 0 else None
    for filling in FILLINGS:
        guards, rest = new_guards(), -1 if filling else 0
        shard = Shard(
            config,
            world=rank.world,
            rank=rank.rank,
            interleave=rank.interleave,
            table_width=room,
            device=DEVICE,
        )
        for name in ("local_lens", "positions", "slot_mapping", "block_table"):
            blank = torch.full_like(getattr(shard, name), 77)
            setattr(shard, name, guards.place(name, blank, written=True))
        table = torch.tensor(step.table, dtype=I32).view(len(step.table), width)
        used = {row.number: -(-_local_len(row.keys, rank) // size) for row in rows}
        for number in range(len(table)):
            table[number, used.get(number, 0) :] = rest
        spread = 1 + step.seed % 3
        starts = torch.tensor(step.cu_seqlens_q, dtype=I32)
        given = (
            guards.place("cu_seqlens_q", starts, stride=(spread,)),
            guards.place("seq_lens", torch.tensor(step.seq_lens, dtype=I32), stride=(spread,)),
            guards.place("block_table", table),
        )
        guards.fill(filling)
        with watched():
            shard.launch(*given, tokens)
        guards.check()
        for name, wanted in (("positions", positions), ("local_lens", lens)):
            found = getattr(shard, name)[:tokens].tolist()
            assert found == wanted, f"{name} {found}; expected {wanted}"
        for token, (slot, wanted) in enumerate(
            zip(shard.slot_mapping.tolist(), slots, strict=False)
        ):
            is_right = slot < 0 if wanted is None else slot == wanted
            assert is_right, f"slot {slot} of token {token}; expected {wanted}"
        for token, wanted in enumerate(tables):
            line = shard.block_table[token].tolist()
            expected = wanted + [77] * (room - len(wanted))
            assert line == expected, f"table of token {token}: {line}; expected {expected}"


@cache
def _group() -> Any:
    """Return a group with only this process."""
    folder = tempfile.mkdtemp()
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/alone", rank=0, world_size=1)
    return dist.group.WORLD


@cache
def _mla_of(name: str) -> ContextParallelMla:
    return ContextParallelMla(SETUPS[name].config, _group(), DEVICE)


def forget() -> None:
    """Drop instances whose buffers a failed launch may have left incomplete."""
    _mla_of.cache_clear()


def _hold_alone(rank: Rank) -> None:
    step = rank.step
    trial, setup = Trial(step), SETUPS[step.config]
    config: MlaConfig = setup.config
    latent = config.kv_lora_rank
    padded = [token for token in range(step.num_tokens) if token not in trial.own]
    outs = []
    for filling in FILLINGS:
        guards = new_guards()
        cache = new_cache(config, guards, step.seed, trial.live(), filling)
        queries = trial.queries.clone()
        queries.view(torch.uint8)[padded] = filling
        q_nope = guards.place("q_nope", queries[..., :latent])
        q_pe = guards.place("q_pe", queries[..., latent:])
        ckv = guards.place("ckv", trial.latents[:, :latent])
        k_pe = guards.place("k_pe", trial.latents[:, latent:])
        out = guards.place("out", torch.zeros_like(q_nope, device="cpu"), written=True)
        lse = guards.place("lse", torch.zeros(out.shape[:2]), written=True)
        lengths = trial.lengths(guards)
        table = trial.table(guards, filling)
        guards.fill(filling)
        mla = _mla_of(step.config)
        before = bits_of_slots(config, cache)
        with watched():
            mla.plan(MlaStep(*lengths, table, num_tokens=step.num_tokens))
            mla.append(ckv, k_pe, cache)
            mla.attend(q_nope, q_pe, cache, out=out, lse=lse)
        guards.check()
        changed = (before != bits_of_slots(config, cache)).any(1).nonzero().flatten().tolist()
        foreign = [slot for slot in changed if slot not in trial.written]
        assert not foreign, (
            f"slots {foreign} of the cache were written, but no token has these slots"
        )
        assert bool((out[padded] == 0).all()), "out of padded tokens"
        assert bool((lse[padded] == -math.inf).all()), "lse of padded tokens"
        outs.append((out.cpu(), lse.cpu()))
    contested = {t for row in trial.rows if trial.is_contested(row) for t in row.tokens}
    tokens = [token for token in range(step.num_tokens) if token not in contested]
    for one, other in zip(*outs, strict=True):
        same = torch.equal(as_bits(one[tokens]), as_bits(other[tokens]))
        assert same, "outputs depend on memory that must not be read"
    for row in trial.rows:
        if row.query_len and all(0 <= block < NUM_BLOCKS for block in row.blocks):
            queries = slice(row.tokens.start, row.tokens.stop)
            keys = rows_of_slots(cache, trial.seen_by(row))
            wanted = dense(config, trial.queries[queries], keys, visible(config, row, None))
            for given, expected in zip(outs[1], wanted, strict=True):
                torch.testing.assert_close(
                    given[queries].double(), expected, rtol=setup.tolerance, atol=setup.tolerance
                )
