"""Random tensors of a case, and a float32 reference to which results are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.latent_cache import Cache
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tools.bench.cases import Case, P, R

SCALE = 192**-0.5
_LIMIT = 6e-3  # largest relative error of a row with bfloat16 operands and weights
ROUNDED_LIMIT = 0.15
"""The largest relative error of a row whose queries and weights are rounded to e4m3."""


@dataclass
class Tensors:
    """A case on the device, with blocks in random order; ``q`` is [B, query_len, H, R + P]."""

    case: Case
    q: torch.Tensor
    cache: torch.Tensor  # [num_blocks, block_size, R + P]
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    mask: torch.Tensor | None
    q_nope: torch.Tensor  # [T, H, R]
    q_pe: torch.Tensor

    @property
    def config(self) -> MlaConfig:
        """The configuration of the case."""
        case = self.case
        return MlaConfig(
            num_heads=case.num_heads,
            softmax_scale=SCALE,
            block_size=case.block_size,
            max_rows=len(case.seq_lens),
            max_query_tokens=len(self.q_nope),
            max_model_len=max(case.seq_lens),
            mask="tree:qlen" if case.is_tree else "causal",
            max_draft_tokens=case.query_len if case.is_tree else 0,
        )


def build(case: Case, device: str = "cuda") -> Tensors:
    """Draw the tensors of a case; they are the same in every call on one kind of device."""
    torch.manual_seed(0)
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    order = torch.randperm(sum(counts)).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count], order = order[:count], order[count:]
    rows, queries = len(counts), case.query_len
    size = (sum(counts), case.block_size, R + P)
    cache = torch.randn(size, dtype=torch.bfloat16, device=device) / 2
    q = torch.randn(rows, queries, case.num_heads, R + P, dtype=cache.dtype, device=device) / 2
    flat = q.flatten(0, 1)
    return Tensors(
        case,
        q,
        cache,
        table.to(device),
        torch.tensor(case.seq_lens, dtype=torch.int32).to(device),
        torch.arange(0, (rows + 1) * queries, queries, dtype=torch.int32).to(device),
        _visible(case).flatten().repeat(rows).to(device) if case.is_tree else None,
        flat[..., :R].contiguous(),
        flat[..., R:].contiguous(),
    )


def _visible(case: Case) -> torch.Tensor:
    """Return a mask of the drafts that each draft attends to, bool [query_len, query_len].

    In a chain these are all earlier drafts, in a tree the ancestors in a binary tree, and in both
    the draft itself.
    """
    count = case.query_len
    visible = torch.ones(count, count, dtype=torch.bool).tril()
    if case.is_tree:
        visible = torch.eye(count, dtype=torch.bool)
        for node in range(1, count):
            visible[node] |= visible[(node - 1) // 2]
    return visible


def plan(core: Core, tensors: Tensors) -> None:
    """Plan the step of a case with `core`."""
    lengths = (tensors.cu_seqlens_q, tensors.seq_lens, tensors.block_table)
    step = MlaStep(*lengths, num_tokens=len(tensors.q_nope), mask=tensors.mask)
    core.fill(core.plan, step, max_query_len=tensors.case.query_len)


def attention(tensors: Tensors, config: MlaConfig, cache: Cache) -> Callable[[], torch.Tensor]:
    """Plan a case and return a function that attends over `cache` and returns out [T, H, R]."""
    core = Core(config, tensors.q.device)
    plan(core, tensors)
    out = torch.full_like(tensors.q_nope, torch.nan)
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)

    def launch() -> torch.Tensor:
        queries = Queries(tensors.q_nope, tensors.q_pe)
        core.attend(core.plan, queries, cache, Answer(out, lse))
        return out

    return launch


def error(tensors: Tensors, out: torch.Tensor, limit: float = _LIMIT) -> float:
    """Return the largest relative error of the first and last row, `out` [B, query_len, H, R].

    Raises
    ------
    ArithmeticError
        The error is NaN or above `limit`, which by default allows for bfloat16.
    """
    case, worst = tensors.case, 0.0
    for row in {0, len(case.seq_lens) - 1}:
        length = case.seq_lens[row]
        blocks = tensors.block_table[row, : -(-length // case.block_size)].long()
        keys = tensors.cache[blocks].flatten(0, 1)[:length].float()
        scores = SCALE * torch.einsum("qhd,sd->qhs", tensors.q[row].float(), keys)
        hidden = ~_visible(case).to(scores.device)[:, None]
        scores[..., length - case.query_len :].masked_fill_(hidden, -torch.inf)
        want = scores.softmax(-1) @ keys[:, :R]
        worst = max(worst, off_by(out[row], want, limit, f"row {row} of {case.name}"))
    return worst


def off_by(out: torch.Tensor, want: torch.Tensor, limit: float, what: str) -> float:
    """Return the relative error of an output; the message of an error starts with `what`.

    Raises
    ------
    ArithmeticError
        The error is NaN or above `limit`.
    """
    found = float((out.float() - want).norm() / want.norm())
    if not found < limit:
        raise ArithmeticError(f"{what} has a relative error of {found:.1e}, above its limit")
    return found
