"""Prefill rows as engines hand them over, against dense attention. S-4, S-6, S-21."""

from __future__ import annotations

from dataclasses import replace

import torch
from prefill_step import assert_close, build, prefix_sums

from paged_mla_optimized import Prefill
from paged_mla_optimized.engines.heads import HeadsPrefill, Keys, warm_up


def attend(heads, part, step):
    """Call as engines do: positions copied to every head, keys and values of one projection."""
    keys, queries = ([row[i] for row in step.lens] for i in (0, 1))
    q = torch.cat([step.q_nope, step.q_pe], dim=-1)
    k_pe = step.k_pe[:, None].expand(-1, step.config.num_heads, -1)
    k = torch.cat([step.k_nope, k_pe], dim=-1)
    projected = torch.cat([step.k_nope, step.v], dim=-1)
    v = projected[..., step.k_nope.shape[-1] :]
    lse = torch.full((q.shape[1], len(q)), torch.nan)  # as vLLM merges it
    sums = prefix_sums(queries), prefix_sums(keys)
    return heads.attend(part, *sums, q=q, k=k, v=v, lse=lse.t()), lse.t()


def test_new_tokens_and_a_chunk_of_contexts():
    """Two layers of one step; of the chunk's rows one has no context."""
    for causal, lens in ((True, ((7, 7), (20, 20))), (False, ((33, 7), (0, 20)))):
        step = build(*lens, causal=causal)
        heads = HeadsPrefill(step.config)
        for _ in range(2):
            assert_close(attend(heads, 0, step), step)


def test_another_part_and_another_step_are_planned_anew():
    first, second = build((5, 5)), build((3, 3), (2, 2))
    heads = HeadsPrefill(first.config)
    for part, step in ((0, first), (1, second), (0, first)):
        assert_close(attend(heads, part, step), step)
    heads.forget()
    assert_close(attend(heads, 0, second), second)


def test_each_part_is_planned_once_a_step(monkeypatch):
    """New tokens and two chunks of three layers: later layers plan nothing."""
    parts = [build((9, 5)), build((4, 5)), build((7, 5))]
    heads = HeadsPrefill(parts[0].config)
    plan, planned = Prefill.plan, []

    def noted(*given, **named):
        planned.append(named)
        plan(*given, **named)

    monkeypatch.setattr(Prefill, "plan", noted)
    for steps in (1, 2):
        for _layer in range(3):
            for part, step in enumerate(parts):
                assert_close(attend(heads, part, step), step)
        assert len(planned) == steps * len(parts)
        heads.forget()


def test_separate_keys_and_outputs_in_a_given_tensor():
    """As a projection leaves them, halves of its lines, and what depends on position once."""
    step = build((7, 7), (33, 20))
    projected = torch.cat([step.k_nope, step.v], dim=-1)
    k_nope, v = projected.split([step.config.qk_nope_head_dim, step.config.v_head_dim], dim=-1)
    sums = (prefix_sums([row[i] for row in step.lens]) for i in (1, 0))
    q = torch.cat([step.q_nope, step.q_pe], dim=-1)
    lse, out = torch.full(q.shape[:2], torch.nan), torch.full_like(v[: len(q)], torch.nan)
    keys = Keys(k_nope, step.k_pe[:, None])
    HeadsPrefill(step.config).attend(0, *sums, q=q, k=keys, v=v, lse=lse, out=out)
    assert_close((out, lse), step)


def test_kernels_compile_once_for_all_layers(monkeypatch):
    """Layers are made one by one, each with a config of its own that equals the others'."""
    causal, context = (build((5, 5), causal=causal).config for causal in (True, False))
    warmed = []
    monkeypatch.setattr(Prefill, "warm_up", lambda self: warmed.append(self.config))
    for _layer in range(3):
        for config in (causal, context):
            warm_up(replace(config), torch.device("cpu"))
    assert warmed == [causal, context]
