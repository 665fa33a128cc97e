"""Draws for ``MlaLayer``: lengths on the device that differ from those that the host passes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from caches import bits_of_slots, group_size, new_cache, rows_of_slots
from drawn_steps import OF_STEPS, legal, spoil_fields
from hypothesis import strategies as st
from machine import DEVICE, FILLINGS, ON_GPU, SETUPS, as_bits, new_guards, watched
from rows import dense_heads, visible
from steps import Step, Trial
from values import Draw

from paged_mla_optimized import HeadWeights, LayerConfig, MlaLayer
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

I32 = torch.int32
READS = {"absorbed rows": OF_STEPS, "materialized rows": OF_STEPS}
_NAMES = ["few", "tile_fp8", "few_non_causal"] if ON_GPU else ["causal", "rope", "fp8_ds_mla"]
_N, _V = (128, 128) if ON_GPU else (16, 32)
_TOLERANCE = 5e-2 if ON_GPU else 1e-3


@dataclass(frozen=True)
class Layer:
    """A step of a layer, and the host's description of it.

    Parameters
    ----------
    step : Step
    absorbed_rows : int or None
        ``None`` if the host passes no description.
    query_lens, max_seq_lens : tuple of int
        The host's description otherwise.
    room : int
        The number of keys that are materialized at a time.
    """

    step: Step
    absorbed_rows: int | None
    query_lens: tuple[int, ...] = ()
    max_seq_lens: tuple[int, ...] = ()
    room: int = 64


@st.composite
def layers(draw: Draw, first: tuple[str, str]) -> Layer:
    """Draw a step that the host describes, then change the tensors on the device."""
    name = draw(st.sampled_from(_NAMES))
    config = SETUPS[name].config
    fields = legal(draw, name)
    starts, lens = fields["cu_seqlens_q"], fields["seq_lens"]
    query_lens = tuple(end - begin for begin, end in itertools.pairwise(starts))
    told = [draw(st.sampled_from([n, n, n, min(n + 1, config.max_model_len)])) for n in lens]
    absorbed = None
    if config.mask == "causal" and draw(st.integers(0, 4)):
        absorbed = draw(st.integers(0, len(lens)))
    ways = [(value, kind) for value, kinds in OF_STEPS.items() for kind in kinds]
    more = draw(st.lists(st.sampled_from(ways), max_size=1))
    step = spoil_fields(draw, fields, [first, *more])
    step = replace(step, slots=None, scale=None, max_query_len=None, lines=0)
    room = config.max_query_tokens + draw(st.sampled_from([0, 17]))
    if absorbed is None:
        return Layer(step, None, room=room)
    return Layer(step, absorbed, query_lens, tuple(told), room)


def launches(layer: Layer) -> list[str]:
    """Return the forms of a draw's rows."""
    absorbed, rows = layer.absorbed_rows, len(layer.step.seq_lens)
    forms = ["absorbed rows"] if absorbed is None or absorbed > 0 else []
    return forms if absorbed is None or absorbed == rows else [*forms, "materialized rows"]


@cache
def _layer_of(name: str, room: int) -> MlaLayer:
    config = LayerConfig(
        attention=SETUPS[name].config,
        qk_nope_head_dim=_N,
        v_head_dim=_V,
        workspace_tokens=room,
    )
    return MlaLayer(config, DEVICE)


@cache
def _weights_of(name: str) -> HeadWeights:
    config = SETUPS[name].config
    shape = (config.num_heads, _N + _V, config.kv_lora_rank)
    by_head = torch.randn(shape, generator=torch.Generator().manual_seed(9))
    by_head = by_head * config.kv_lora_rank**-0.5
    return HeadWeights(by_head.to(config.dtype).to(DEVICE), _N)


def forget() -> None:
    """Drop instances whose buffers a failed launch may have left incomplete."""
    _layer_of.cache_clear()


def _is_told_truth(layer: Layer, trial: Trial) -> bool:
    """Return whether the host's description is right for the legal rows."""
    if layer.absorbed_rows is None:
        return True
    starts = [0]
    for query_len in layer.query_lens:
        starts.append(starts[-1] + query_len)
    told = layer.max_seq_lens
    return [*layer.step.cu_seqlens_q] == starts and all(
        row.keys <= told[row.number] for row in trial.rows
    )


def hold(layer: Layer) -> None:
    """Plan, append and attend twice; check that illegal rows are padding in both forms."""
    step, trial = layer.step, Trial(layer.step)
    config, weights = trial.config, _weights_of(step.config)
    is_true = _is_told_truth(layer, trial)
    generator = torch.Generator().manual_seed(step.seed)
    shape = (step.num_tokens, config.num_heads, _N + config.qk_rope_head_dim)
    queries = torch.randn(shape, generator=generator).to(config.dtype)
    padded = [token for token in range(step.num_tokens) if token not in trial.own]
    ran = []
    for filling in FILLINGS:
        guards = new_guards()
        cache = new_cache(config, guards, step.seed, trial.live(), filling)
        given = queries.clone()
        if is_true:  # otherwise tokens may belong to other rows
            given.view(torch.uint8)[padded] = filling
        whole = guards.place("queries", given)
        latents = trial.latents
        ckv = guards.place("ckv", latents[:, : config.kv_lora_rank])
        k_pe = guards.place("k_pe", latents[:, config.kv_lora_rank :])
        blank = torch.zeros((*shape[:2], _V), dtype=config.dtype)
        out = guards.place("out", blank, written=True)
        lse = guards.place("lse", torch.zeros(shape[:2]), written=True)
        lengths = trial.lengths(guards)
        table = trial.table(guards, filling)
        guards.fill(filling)
        host: dict[str, Any] = {}
        if layer.absorbed_rows is not None:
            host = {
                "query_lens": layer.query_lens,
                "max_seq_lens": layer.max_seq_lens,
            }
        mla = _layer_of(step.config, layer.room)
        before = bits_of_slots(config, cache)
        try:
            with watched():
                planned = MlaStep(*lengths, table, num_tokens=step.num_tokens, **host)
                mla.plan(planned, absorbed_rows=layer.absorbed_rows)
                mla.append(ckv, k_pe, cache)
                mla.attend(whole[..., :_N], whole[..., _N:], cache, weights, out=out, lse=lse)
        except InvalidArgument:
            guards.check()
            assert torch.equal(before, bits_of_slots(config, cache)), "the cache was written"
            return
        guards.check()
        changed = (before != bits_of_slots(config, cache)).any(1).nonzero().flatten().tolist()
        groups = {slot // group_size(config) for slot in trial.written}
        foreign = [group for group in changed if group not in groups]
        assert not foreign, (
            f"slots {foreign} of the cache were written, but no token has these slots"
        )
        if is_true:
            assert bool((out[padded] == 0).all()), "out of padded tokens"
            assert bool((lse[padded] == -math.inf).all()), "lse of padded tokens"
        ran.append((out.cpu(), lse.cpu()))
    contested = {t for row in trial.rows if trial.is_contested(row) for t in row.tokens}
    if not contested:
        for one, other in zip(*ran, strict=True):
            same = torch.equal(as_bits(one), as_bits(other))
            assert same, "outputs depend on memory that must not be read"
    if is_true and not config.is_fp8 and config.rope is None:
        _hold_dense(trial, weights, queries, cache, ran[1])


def _hold_dense(
    trial: Trial, weights: HeadWeights, queries: torch.Tensor, cache: Any, answer: Any
) -> None:
    config, rank = trial.config, trial.config.kv_lora_rank
    w_uk, w_uv = weights.w_uk.cpu().double(), weights.w_uv.cpu().double()
    for row in trial.rows:
        if not row.query_len or not trial.has_all_blocks(row):
            continue
        tokens = slice(row.tokens.start, row.tokens.stop)
        keys = rows_of_slots(cache, trial.seen_by(row)).double()
        k_nope = torch.einsum("kr,hnr->khn", keys[:, :rank], w_uk)
        k_pe = keys[:, None, rank:].expand(-1, config.num_heads, -1)
        values = torch.einsum("kr,hvr->khv", keys[:, :rank], w_uv)
        out, lse = dense_heads(
            config.softmax_scale,
            queries[tokens],
            torch.cat([k_nope, k_pe], dim=-1),
            values,
            visible(config, row, None),
        )
        for given, wanted in zip(answer, (out, lse * config.lse_unit), strict=True):
            torch.testing.assert_close(
                given[tokens].double(), wanted, rtol=_TOLERANCE, atol=_TOLERANCE
            )
