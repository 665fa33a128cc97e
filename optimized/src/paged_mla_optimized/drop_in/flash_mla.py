"""Dense decode with the names of FlashMLA (https://github.com/deepseek-ai/FlashMLA, 9241ae3).

``from paged_mla_optimized.drop_in.flash_mla import get_mla_metadata, flash_mla_with_kvcache``
replaces ``from flash_mla import ...``. Signatures, shapes and conventions are those of
``flash_mla/flash_mla_interface.py`` at commit 9241ae3. The module supports caches of
bfloat16, float16 and float32 and rows of any ``seq_len_q``, on every architecture that
:class:`~paged_mla_optimized.api.paged_mla.PagedMla` supports. Sparse attention, sinks, extra caches
and FP8 caches raise ``Unsupported``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton import next_power_of_2

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.config.arguments import check_between, check_kind, check_scale, integer
from paged_mla_optimized.config.attention import DTYPE_NAMES, MlaConfig
from paged_mla_optimized.config.limits import (
    MAX_BLOCK_SIZE,
    MAX_HEADS,
    MAX_MODEL_LEN,
    MAX_ROWS,
    MAX_TOKENS,
)
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_optimized.tensors.checks import check_tensor, check_token_stride
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tensors.values.steps import check_step_values
from paged_mla_shared.errors import InvalidArgument, Unsupported

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

_VALUE_WIDTHS = (16, 32, 64, 128, 256, 512)
_ROTATED_WIDTHS = (16, 32, 64)
_LEAST = 512
"""Smallest capacities for rows and tokens, so that most steps share compiled kernels."""
_LOCK = threading.Lock()  # threads that use one stream share buffers
_CORES: dict[tuple[MlaConfig, torch.device, int], Core] = {}
"""Buffers and kernels by config, device and stream. They are never freed, since a CUDA graph may
contain their addresses. They are few, since capacities are rounded up to powers of two."""


class _Config(MlaConfig):
    """A config without the warning about its scale, since FlashMLA's default is ``D ** -0.5``."""

    def _warn_of_scale(self) -> None:
        """Do nothing."""


class FlashMLASchedMeta(Uncopied):
    """How a step is divided over the device; it is empty until the step's first call.

    Get a new object from :func:`get_mla_metadata` for each step. The first call of
    :func:`flash_mla_with_kvcache` with the object plans the step, and the calls of the other layers
    use the same plan.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._step: Hashable = None

    def _planned(
        self,
        core: Core,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> Plan:
        """Return the plan of the step; the first call of the step creates it."""
        # A plan does not depend on the softmax scale.
        config = replace(core.config, softmax_scale=1.0)
        step = (config, q.shape, k_cache.shape[2], block_table.shape, q.device)
        if self._step not in {None, step}:
            given = "the metadata of calls with other shapes, another dtype, device or mask"
            allowed = "the result of a new get_mla_metadata() for each kind of step"
            raise InvalidArgument("tile_scheduler_metadata", given, allowed)
        rows, query_len = q.shape[:2]
        if core.switch.is_on:
            if self._plan is not None:
                _check_planned(self._plan, cache_seqlens)
            _check_values(core.config, query_len, len(k_cache), cache_seqlens, block_table)
        is_causal = core.config.mask == "causal"
        if is_causal:  # each row of the table belongs to two planned rows
            block_table = block_table.repeat_interleave(2, 0)
        if self._plan is None:
            plan = core.new_plan()
            starts, lens = _planned_rows(cache_seqlens, query_len, is_causal=is_causal)
            planned = MlaStep(starts, lens, block_table, num_tokens=rows * query_len)
            core.fill(plan, planned, max_query_len=max(query_len, 1))
            self._plan, self._step = plan, step
        self._plan.host = self._plan.host._replace(given_table=block_table)
        return self._plan


def get_mla_metadata(*_arguments: Any, **_named: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return the metadata of a new step, which the first call of the step fills.

    Parameters
    ----------
    *_arguments, **_named
        Ignored, as FlashMLA ignores them: older releases computed the metadata here.

    Returns
    -------
    tile_scheduler_metadata : FlashMLASchedMeta
    num_splits : None
        Older releases returned a tensor.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend every query of a step to its row's cached tokens.

    The call launches kernels on the current stream of `q`'s device and never waits for them. It
    compiles a kernel at its first launch, so run the same calls once before a CUDA graph captures
    them. If lengths change between replays of a graph, capture calls with new metadata, so that the
    graph contains the planning. Steps of one stream share scratch memory: two graphs that were
    captured on one stream must not replay at the same time. A function under ``torch.compile`` has
    a graph break here, as with FlashMLA's own function.

    Parameters
    ----------
    q : dtype [B, S, H, D]
        Absorbed queries, rotated part last. The dtype is bfloat16, float16 or float32. The last
        stride is 1. B is at most 32766, or 16383 if `causal` is true and S is above 1; B * S is at
        most 2^23.
    k_cache : dtype [num_blocks, page_block_size, H_kv, D]
        The cached tokens of each of H_kv key heads; H is a multiple of H_kv, at most 128 times.
        Pages have 1 to 32768 tokens. The last stride is 1, and the stride of tokens is less than
        2^24 elements.
    block_table : int32 [B, M]
        The pages of each row in order. Entries after a row's last page may have any value.
    cache_seqlens : int32 [B]
        Tokens of each row, including those of this step. A length below 0, or a length that
        exceeds M pages, counts as 0.
    head_dim_v : int
        R, a power of two from 16 to 512: the first R elements of a cached token are its value. The
        other D - R elements are a power of two from 16 to 64. DeepSeek's D is 576 and R is 512.
    tile_scheduler_metadata : FlashMLASchedMeta
        The result of :func:`get_mla_metadata`. All calls with one object must have the same shapes
        (B, S, H, D, H_kv, M, page_block_size and head_dim_v), dtype, device and `causal`, and the
        same values of `cache_seqlens`, as FlashMLA requires. With ``PAGED_MLA_CHECK=1`` the values
        are compared; otherwise the lengths of the first call are used.
    num_splits : None
    softmax_scale : float or None
        Factor of the scores; finite and > 0. ``None`` uses ``D ** -0.5``.
    causal : bool
        Whether query s of a row sees only its first ``cache_seqlens - S + s + 1`` tokens.
    is_fp8_kvcache : bool
        Must be ``False``; no kernel supports FP8 caches here.
    indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length
        Must be ``None``; no kernel supports them.

    Returns
    -------
    out : dtype [B, S, H, R]
        The output; zeros for queries that see no token. It has no gradient.
    softmax_lse : float32 [B, H, S]
        Natural log-sum-exp of the scaled scores; +inf for queries that see no token.

    Raises
    ------
    InvalidArgument
        A tensor's shape, dtype, device or last stride is wrong, a number or a flag is wrong, or
        the metadata is that of a step with other shapes.
    Unsupported
        No kernel supports an option, a dtype, a size or the device.
    """
    _refuse_options(
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    check_kind("tile_scheduler_metadata", tile_scheduler_metadata, FlashMLASchedMeta)
    if num_splits is not None:
        raise InvalidArgument("num_splits", "a value", "None, as get_mla_metadata returns it")
    answer: tuple[torch.Tensor, torch.Tensor] = _attend(
        tile_scheduler_metadata,
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        softmax_scale,
        causal,
    )
    return answer


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator] # torch's has no types
    reason="the metadata of a step is not a tensor, so no op can take it"
)
def _attend(
    metadata: FlashMLASchedMeta,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check sizes, plan the step unless its metadata has a plan, and attend for each key head."""
    config = _config(q, k_cache, head_dim_v, softmax_scale, causal)
    rows, query_len, heads, _ = q.shape
    block_table = _int32("block_table", block_table, (rows, None), q.device)
    cache_seqlens = _int32("cache_seqlens", cache_seqlens, (rows,), q.device)
    with _LOCK:
        core = _core(config, q.device)
        plan = metadata._planned(core, q, k_cache, cache_seqlens, block_table)
        rank, group = config.kv_lora_rank, config.num_heads
        queries = q.flatten(0, 1)  # [B * S, H, D]
        out = q.new_empty(len(queries), heads, rank)
        lse = q.new_empty(len(queries), heads, dtype=torch.float32)
        for number, cache in enumerate(k_cache.unbind(2)):  # [num_blocks, page_block_size, D]
            own = slice(number * group, (number + 1) * group)
            mine = Queries(queries[:, own, :rank], queries[:, own, rank:])
            core.attend(plan, mine, cache, Answer(out[:, own], lse[:, own]))
    lse = lse.view(rows, query_len, heads).transpose(1, 2).contiguous()
    torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf, out=lse)
    return out.view(rows, query_len, heads, rank), lse


def _check_planned(plan: Plan, cache_seqlens: torch.Tensor) -> None:
    """Check that the lengths of a call are those of the step's first call; synchronizes."""
    planned = plan.row_lens[: plan.num_rows].view(len(cache_seqlens), -1)[:, -1]
    if not torch.equal(planned, cache_seqlens):
        given = f"{cache_seqlens.tolist()}, and {planned.tolist()} in the first call"
        allowed = "the lengths of the first call with one tile_scheduler_metadata"
        raise InvalidArgument("cache_seqlens", given, allowed)


def _check_values(
    config: MlaConfig,
    query_len: int,
    num_blocks: int,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Check lengths and pages of the caller's rows, which are not the planned rows; synchronizes.

    A causal row with fewer tokens than queries is legal here, like a row of another mask (S-2).
    """
    rows = len(cache_seqlens)
    try:
        starts = torch.arange(rows + 1, dtype=torch.int32) * query_len
        check_step_values(
            replace(config, mask="non_causal"),
            MlaStep(starts, cache_seqlens, block_table, num_tokens=rows * query_len),
            slot_mapping=torch.full((rows * query_len,), -1),
            num_blocks=num_blocks,
        )
    except InvalidArgument as error:
        name = {"seq_lens": "cache_seqlens"}.get(error.argument, error.argument)
        raise InvalidArgument(name, error.given, error.allowed) from None


def _flag(name: str, value: object) -> bool:
    """Return an argument as a Python bool, after a check that it is a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(name, repr(value), "True or False")
    return bool(value)


def _refuse_options(*, is_fp8_kvcache: bool, **options: object) -> None:
    """Raise ``Unsupported`` for options of sparse attention or FP8 caches."""
    is_fp8 = _flag("is_fp8_kvcache", is_fp8_kvcache) or None
    for name, value in {"is_fp8_kvcache": is_fp8, **options}.items():
        if value is not None:
            raise Unsupported(f"{name} is not supported; use dense attention and no FP8 cache")


def _int32(
    name: str, tensor: torch.Tensor | None, shape: tuple[int | None, ...], device: torch.device
) -> torch.Tensor:
    """Return a tensor that dense attention requires, after a check of its shape and dtype."""
    if tensor is None:
        raise InvalidArgument(name, None, "an int32 tensor, since attention is dense")
    check_tensor(name, tensor, shape, torch.int32, device)
    return tensor


def _config(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
) -> MlaConfig:
    """Check the sizes of a call; return a config with one key head and capacities of its size."""
    check_tensor("q", q, (None,) * 4, None, None, unit_stride=True)
    if q.dtype not in DTYPE_NAMES:
        raise Unsupported(
            f"q of {q.dtype} is not supported; use {', '.join(map(str, DTYPE_NAMES))}"
        )
    rows, query_len, heads, width = q.shape
    cached = (None, None, None, width)
    check_tensor("k_cache", k_cache, cached, q.dtype, q.device, unit_stride=True)
    check_token_stride("k_cache", k_cache.stride(1))
    _, block_size, kv_heads, _ = k_cache.shape
    check_between(1, MAX_BLOCK_SIZE, **{"page_block_size of k_cache": block_size})
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise InvalidArgument(
            "q", f"{heads} heads", f"a multiple of the {kv_heads} heads of k_cache"
        )
    if heads // kv_heads > MAX_HEADS:
        allowed = f"at most {MAX_HEADS} for each head of k_cache"
        raise Unsupported(
            f"q of {heads} heads is not supported for a k_cache of {kv_heads} heads; use {allowed}"
        )
    rank = integer("head_dim_v", head_dim_v)
    rotated = width - rank
    if rank not in _VALUE_WIDTHS or rotated not in _ROTATED_WIDTHS:
        served = f"head_dim_v in {_VALUE_WIDTHS}, and head_dim - head_dim_v in {_ROTATED_WIDTHS}"
        raise Unsupported(f"head_dim_v {rank} with head_dim {width} is not supported; use {served}")
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    check_scale("softmax_scale", scale)
    is_causal = _flag("causal", causal) and query_len > 1  # a single query sees all tokens anyway
    rows_of_each = 2 if is_causal else 1  # see _planned_rows
    check_between(0, MAX_ROWS // rows_of_each, batch_size=rows)
    check_between(0, MAX_TOKENS, **{"batch_size * seq_len_q": rows * query_len})
    return _Config(
        num_heads=heads // kv_heads,
        softmax_scale=scale,
        block_size=block_size,
        max_rows=max(next_power_of_2(rows * rows_of_each + 2), _LEAST) - 2,
        max_query_tokens=max(next_power_of_2(rows * query_len), _LEAST),
        max_model_len=MAX_MODEL_LEN,  # no buffer depends on this size
        kv_lora_rank=rank,
        qk_rope_head_dim=rotated,
        dtype=q.dtype,
        mask="causal" if is_causal else "non_causal",
    )


def _core(config: MlaConfig, device: torch.device) -> Core:
    """Return the buffers and kernels of a config for the current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    core = _CORES.get((config, device, stream))
    if core is None:
        core = _CORES[config, device, stream] = Core(config, device)
        core.writes_planned_slots = False  # the caller has written the step's tokens already
    return core


def _planned_rows(
    cache_seqlens: torch.Tensor, query_len: int, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``cu_seqlens_q`` and ``seq_lens`` of the planned rows, int32, without waiting.

    With a causal mask, if a row has fewer tokens than queries, its first queries see no token. Rule
    S-2 has no such rows. Therefore each row is planned as two rows: the queries that see no token,
    with no tokens, and the other queries with the row's tokens.
    """
    rows, device = len(cache_seqlens), cache_seqlens.device
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len
    if not is_causal:
        return starts, cache_seqlens
    seeing = starts[1:] - cache_seqlens.clamp(0, query_len)  # the first query that sees a token
    both_starts = torch.stack([starts[:-1], seeing], 1).flatten()
    both_lens = torch.stack([torch.zeros_like(cache_seqlens), cache_seqlens], 1).flatten()
    return torch.cat([both_starts, starts[-1:]]), both_lens
