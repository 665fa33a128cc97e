"""Correct kernels in plain torch, for CPU and GPU, from which the careless kernels are made."""

from __future__ import annotations

from dataclasses import replace

import torch

from paged_mla_adapters.declared import capabilities
from paged_mla_adapters.kernel import AppendCall, Call, Kernel, KernelBackend, MergeCall
from paged_mla_adapters.runner import Answers


def attend(call: Call) -> Answers:
    """Return out and lse of softmax(q k) v, for rows with one query token each."""
    rank = call.problem.dims.kv_lora_rank
    out, lse = call.answers()
    keys = call.cache.flatten(0, 1)
    for row, length in enumerate(call.seq_lens.tolist()):
        seen = keys[call.slots[row, :length]].float()
        scores = call.problem.softmax_scale * call.q[row].float() @ seen.mT
        lse[row] = scores.logsumexp(-1)
        out[row] = (scores.softmax(-1) @ seen[:, :rank]).to(out.dtype)
    return out, lse


def append(call: AppendCall) -> None:
    """Write the tokens that have a slot."""
    written, size = call.slot_mapping >= 0, call.problem.block_size
    slots = call.slot_mapping[written]
    call.cache[slots // size, slots % size] = torch.cat([call.ckv, call.k_pe], -1)[written]


def merge(call: MergeCall) -> Answers:
    """Return the merge of two partial results."""
    lse = torch.logaddexp(call.lse_a, call.lse_b)
    out = torch.zeros_like(call.out_a)
    for part, own in ((call.out_a, call.lse_a), (call.out_b, call.lse_b)):
        weight = (own - lse).exp().where(own > -torch.inf, 0.0)[..., None]
        out += torch.where(weight == 0, 0.0, weight * part)
    return out, lse


def backend(name: str = "right", kernel: Kernel = attend, **others: object) -> KernelBackend:
    """Return a backend with correct kernels for float32, except for the kernels that are passed.

    It runs on a GPU. With ``TRITON_INTERPRET=1`` it runs on the CPU.

    Parameters
    ----------
    name : str
    kernel : callable
        The attention kernel.
    **others : callable
        ``append`` or ``merge``.
    """
    declared = capabilities(frozenset({"float32"}), head_dims=((32, 16),))
    declared = replace(declared, ops=declared.ops | {"merge"})
    hooks = {"append": append, "merge": merge} | others
    return KernelBackend(name, "0", kernel, declared, **hooks)  # type: ignore[arg-type]  # by name
