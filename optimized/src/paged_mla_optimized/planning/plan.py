"""The plan of one step: the buffers that the kernels share, which are filled on the device."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
import triton

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.plan import (
    Lengths,
    MaskLines,
    Requests,
    Rows,
    Tokens,
    schedule_kernel,
    token_kernel,
)
from paged_mla_optimized.kernels.common.schedule import JOIN_WORDS, Work, words_of_share
from paged_mla_optimized.kernels.common.segments import Tiles
from paged_mla_optimized.planning.families import AttendVariant, fixed_splits, row_share
from paged_mla_optimized.runtime.kernel_spec import DENSE, STRIDE, KernelSpec, number
from paged_mla_optimized.runtime.launch import Fixed, Launcher
from paged_mla_optimized.tensors.step import MlaStep, RequestMap

_TOKENS_PER_PROGRAM = 64
_ENTRIES_PER_PROGRAM = 512
_LARGEST = 2**31 - 1  # largest int32


class PlanKernels:
    """The kernels that plan a step with one variant, whose tiles determine the schedule.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    num_sms : int
        Multiprocessors of the device.
    """

    def __init__(self, config: MlaConfig, variant: AttendVariant, num_sms: int) -> None:
        self.variant = variant
        self.programs = variant.programs(num_sms)
        self.schedule = Launcher(schedule_spec(config, variant, num_sms))
        self.tokens = Launcher(token_spec(config, variant))


class HostPlan(NamedTuple):
    """The part of a planned step that the host knows; the rest is on the device.

    Parameters
    ----------
    num_rows, num_tokens : int
        B and T, padding included.
    max_query_len : int or None
        The longest query, if the step specifies it.
    choice : int or None
        Index of the step's variant among those of its instance. ``None`` if a compiled function
        planned the step; its first launch then chooses the variant.
    query_len : int
        The query length for which the variant's tiles are chosen.
    given_table : int32 [B, M] or None
        The caller's block table; ``None`` if the plan built one.
    """

    num_rows: int = 0
    num_tokens: int = 0
    max_query_len: int | None = None
    choice: int | None = 0
    query_len: int = 1
    given_table: torch.Tensor | None = None


class Plan:
    """Device buffers that describe a step; they are allocated once and :meth:`fill` rewrites them.

    Parameters
    ----------
    config : MlaConfig
    variants : list of AttendVariant
        The variants that a step can get.
    num_sms : int
        Multiprocessors of the device.
    device : torch.device

    Attributes
    ----------
    state : int64 [n]
        The storage of all buffers below.
    token_starts : int32 [max_rows + 2]
        First token of each row, then of the padded tokens, then T.
    row_lens : int32 [max_rows + 1]
        ``seq_lens``, then 0 for the padded tokens.
    key_starts : int32 [max_rows + 2]
        Prefix sums of ``row_lens``, from 0; they saturate at 2 ** 31 - 1.
    first_tokens : int32 [max_rows]
        The first token of each row that is gathered, which is 0.
    unit_starts : int64 [max_rows + 2]
        Prefix sums of the work units of rows, see ``kernels/common/schedule.py``.
    cut : int64 [4], or [5 + max_rows + 1] with ``batch_invariant``
        Units of one part of the grid, lanes, all units, and the overhead of a group. With
        ``batch_invariant`` the fourth entry is the padding of a group; then follow the overhead of
        a split, and the key tiles of each row's splits.
    shares : int64 [programs, 4], or [programs, 8] with ``batch_invariant``
        For each program of the attend kernel: the unit of its first key tile, the first unit after
        its work, the row of the first unit, and its first partial query tile. With
        ``batch_invariant`` the fourth entry is the program that begins its last split. Later
        entries record which roles have published a state that no program has taken yet; between
        launches there is none.
    joins : int32 [joins, 8]
        The partial results that are merged, see ``kernels/common/schedule.py``.
    join_starts : int32 [max_rows + 2]
        Prefix sums, from 0, of the query tiles of each row that have several splits; empty without
        ``batch_invariant``.
    mask_starts : int64 [max_rows + 1]
        For each row, the first element of its tree matrix that describes drafts.
    positions, slot_mapping : int64 [max_query_tokens]
        Rules S-3 and S-1.
    is_padding : int8 [max_query_tokens]
        1 for padded tokens, whose output is (0, -inf).
    slots : int64 [T]
        The entries of `slot_mapping` for the planned step.
    tree_words : int32 [max_query_tokens, tree_words]
        The draft tree, with 32 nodes per word, independent of the spelling of the mask.
    table : int32 [max_rows, table_width]
        The table that is built from a request map; empty if the config has no `table_multiple`.
    work : Fixed
        A ``Work`` record: the buffers in which an attend kernel finds its part of the work.
    host : HostPlan
        The sizes and the kernel choice of the planned step.
    """

    token_starts: torch.Tensor
    row_lens: torch.Tensor
    key_starts: torch.Tensor
    first_tokens: torch.Tensor
    unit_starts: torch.Tensor
    cut: torch.Tensor
    shares: torch.Tensor
    joins: torch.Tensor
    join_starts: torch.Tensor
    mask_starts: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    is_padding: torch.Tensor
    tree_words: torch.Tensor
    table: torch.Tensor

    def __init__(
        self,
        config: MlaConfig,
        variants: list[AttendVariant],
        num_sms: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self._buffers = _buffers(config, variants, num_sms)
        self._offsets, words = {}, 0
        for name, (shape, dtype) in self._buffers.items():
            self._offsets[name], words = words, words + _words(shape, dtype)
        self._bind(torch.zeros(words, dtype=torch.int64, device=device))
        self.host = HostPlan()
        self.latest: Any = None  # the ``PlannedStep`` that these buffers describe

    @property
    def num_rows(self) -> int:
        """B of the planned step, padding included."""
        return self.host.num_rows

    @property
    def num_tokens(self) -> int:
        """T of the planned step, padding included."""
        return self.host.num_tokens

    @property
    def block_table(self) -> torch.Tensor:
        """Block table of the planned step, int32 [B, M]."""
        given = self.host.given_table
        return self.planned("table", self.num_rows) if given is None else given

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer, by name."""
        return {name: getattr(self, name) for name in self._buffers}

    def planned(self, name: str, length: int) -> torch.Tensor:
        """Return the first `length` lines of a buffer; in a compiled function, a copy.

        A compiler knows that ``plan`` writes :attr:`state`, but not which buffers it contains.
        """
        if not torch.compiler.is_compiling():
            buffer: torch.Tensor = getattr(self, name)
            return buffer[:length]
        return self._buffer_in(self.state, name)[:length].clone()

    def on(self, state: torch.Tensor) -> Plan:
        """Return this plan, or a copy of it whose buffers are in `state`."""
        if state.data_ptr() == self.state.data_ptr():
            return self
        other = copy.copy(self)
        other._bind(state)
        return other

    def _bind(self, state: torch.Tensor) -> None:
        self.state = state
        for name in self._buffers:
            setattr(self, name, self._buffer_in(state, name))
        self._slots = self.slot_mapping[:0]
        self.work = Fixed(
            Work(
                self.unit_starts,
                self.cut,
                self.shares,
                self.token_starts,
                self.row_lens,
                self.tree_words,
            )
        )
        self._rows = Fixed(
            Rows(
                self.token_starts,
                self.row_lens,
                self.key_starts,
                self.first_tokens,
                self.unit_starts,
                self.cut,
                self.join_starts,
                self.mask_starts,
            )
        )
        self._tokens = Fixed(Tokens(self.positions, self.slot_mapping, self.is_padding))

    def _buffer_in(self, state: torch.Tensor, name: str) -> torch.Tensor:
        (shape, dtype), offset = self._buffers[name], self._offsets[name]
        flat = state[offset : offset + _words(shape, dtype)].view(dtype)
        return flat[: math.prod(shape)].view(shape)

    @property
    def slots(self) -> torch.Tensor:
        """Slots of the planned step, int64 [T]."""
        if self._slots.shape[0] != self.num_tokens:  # changes once per step, not in each layer
            self._slots = self.slot_mapping[: self.num_tokens]
        return self._slots

    def fill(
        self,
        kernels: PlanKernels,
        step: MlaStep,
        host: HostPlan,
    ) -> None:
        """Describe a step in the buffers with at most two kernel launches, without waiting."""
        self.host = host
        self._schedule(kernels, step)
        if host.num_tokens > 0:
            self._describe_tokens(kernels, step.mask)

    def _schedule(self, kernels: PlanKernels, step: MlaStep) -> None:
        config, block_table, mask = self.config, step.block_table, step.mask
        cu_seqlens_q, seq_lens = step.cu_seqlens_q, step.seq_lens
        if isinstance(block_table, RequestMap):
            slots, ids = block_table.req_to_token, block_table.request_ids
            builders = self.num_rows * -(-config.table_width // _ENTRIES_PER_PROGRAM)
            num_requests = slots.shape[0]
        else:
            slots, ids = self.table, self.row_lens  # placeholders that are never read
            builders = 0
            num_requests = -1
        of_lengths = (*cu_seqlens_q.stride(), *seq_lens.stride())
        of_requests = (*slots.stride(), *ids.stride())
        kernels.schedule(
            (1 + builders, 1, 1),
            (of_lengths, of_requests, ids.dtype),
            (cu_seqlens_q, seq_lens, *of_lengths),
            (slots, ids, *of_requests),
            self._rows,
            self.table,
            self.num_rows,
            self.num_tokens,
            config.num_heads,
            config.block_size,
            config.table_width,
            config.table_fill,
            min(config.max_model_len, step.most_keys(config.block_size)),
            min(num_requests, _LARGEST),
            config.max_draft_tokens,
            0 if mask is None else mask.numel(),
        )

    def _describe_tokens(self, kernels: PlanKernels, mask: torch.Tensor | None) -> None:
        block_table = self.block_table
        # Without a tree no mask is read; any tensor can be passed.
        words = self.tree_words if mask is None else mask.view(torch.uint8)
        joins = most_joins(
            self.config, kernels.variant, kernels.programs, self.num_rows, self.num_tokens
        )
        described = max(self.num_tokens, kernels.programs + 1, joins)
        kernels.tokens(
            (-(-described // _TOKENS_PER_PROGRAM), 1, 1),
            (block_table.stride(1), words.stride()),
            self.work,
            self.mask_starts,
            self.join_starts,
            block_table,
            *block_table.stride(),
            (words, words.stride(0), words.stride(-1)),
            self._tokens,
            self.joins,
            self.num_rows,
            self.num_tokens,
            kernels.programs,
            joins,
            self.config.num_heads,
            self.config.block_size,
        )


def most_joins(
    config: MlaConfig, variant: AttendVariant, programs: int, num_rows: int, num_tokens: int
) -> int:
    """Return the most merges of a step: one per part, or per query tile with several splits."""
    if not config.batch_invariant:
        return programs
    splits = fixed_splits(variant, config.max_rows, config.kv_lora_rank)
    pairs = num_tokens * config.num_heads + num_rows * (variant.tile_m - 1)
    return max(min(pairs // variant.tile_m, num_rows * (splits // 2)), 1)


def _buffers(
    config: MlaConfig, variants: list[AttendVariant], num_sms: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every buffer of a plan."""
    rows, tokens = config.max_rows, config.max_query_tokens
    programs = [variant.programs(num_sms) for variant in variants]
    joins = [most_joins(config, v, v.programs(num_sms), rows, tokens) for v in variants]
    split_words = rows + 2 if config.batch_invariant else 0
    table_rows = rows if config.table_width else 0
    return {
        "token_starts": ((rows + 2,), torch.int32),
        "row_lens": ((rows + 1,), torch.int32),
        "key_starts": ((rows + 2,), torch.int32),
        "first_tokens": ((rows,), torch.int32),
        "unit_starts": ((rows + 2,), torch.int64),
        "cut": ((4 + split_words,), torch.int64),
        "shares": ((max(programs), words_of_share(config.batch_invariant)), torch.int64),
        "joins": ((max(joins), JOIN_WORDS.value), torch.int32),
        "join_starts": ((split_words,), torch.int32),
        "mask_starts": ((rows + 1,), torch.int64),
        "positions": ((tokens,), torch.int64),
        "slot_mapping": ((tokens,), torch.int64),
        "is_padding": ((tokens,), torch.int8),
        "tree_words": ((tokens, max(config.tree_words, 1)), torch.int32),
        "table": ((table_rows, config.table_width), torch.int32),
    }


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the 64-bit words of a buffer, rounded up to a multiple of 16 bytes."""
    return -(-math.prod(shape) * dtype.itemsize // 16) * 2


WORK_TYPES = Work("*i64", "*i64", "*i64", "*i32", "*i32", "*i32")
"""The Triton types of a plan's ``Work``."""


def schedule_spec(
    config: MlaConfig,
    variant: AttendVariant,
    num_sms: int,
    *,
    ids: str = "*i32",
    stride: str = DENSE,
) -> KernelSpec:
    """Return the kernel that computes a schedule from lengths.

    `ids` is the type of request ids. `stride` is the type of strides that are 1 in most engines.
    """
    types = {
        "lengths": Lengths("*i32", "*i32", stride, stride),
        "requests": Requests("*i32", ids, STRIDE, stride, stride),
        "rows": Rows("*i32", "*i32", "*i32", "*i32", "*i64", "*i64", "*i32", "*i64"),
        "table_ptr": "*i32",
        "num_heads": number(config.num_heads),
        "block_size": number(config.block_size),
        "mask_elements": "i64",
    }
    constants = {
        "MASK": config.mask,
        "TILE_M": variant.tile_m,
        "TILE_N": variant.tile_n,
        "LANE_STEPS": variant.lane_steps,
        "PROGRAMS": variant.programs(num_sms),
        "MIN_UNITS": variant.min_units,
        "OVERHEAD": variant.overhead,
        "SLACK": variant.slack,
        "ROWS": triton.next_power_of_2(config.max_rows + 2),
        "ENTRIES": _ENTRIES_PER_PROGRAM,
        "SPLIT_TILES": variant.split_tiles,
        "ROW_SHARE": row_share(config.max_rows) if config.batch_invariant else 0,
        "FIXED_SPLITS": _fixed_splits(config, variant),
    }
    return KernelSpec(schedule_kernel, constants, types)


def token_spec(config: MlaConfig, variant: AttendVariant, *, stride: str = DENSE) -> KernelSpec:
    """Return the kernel that describes tokens; `stride` is as in :func:`schedule_spec`."""
    types = {
        "work": WORK_TYPES,
        "mask_starts_ptr": "*i64",
        "join_starts_ptr": "*i32",
        "block_table_ptr": "*i32",
        "stride_table_col": stride,
        "mask": MaskLines("*u8", STRIDE, stride),
        "tokens": Tokens("*i64", "*i64", "*i8"),
        "joins_ptr": "*i32",
        "num_heads": number(config.num_heads),
        "block_size": number(config.block_size),
    }
    constants = {
        "MASK": config.mask,
        "TILE_M": variant.tile_m,
        "TILE_N": variant.tile_n,
        "FIXED_SPLITS": _fixed_splits(config, variant),
        "TREE_WORDS": config.tree_words,
        "LANE_STEPS": variant.lane_steps,
        "SEARCH_STEPS": config.search_steps,
        "TOKENS": _TOKENS_PER_PROGRAM,
    }
    return KernelSpec(token_kernel, constants, types)


def tiles_of(config: MlaConfig, variant: AttendVariant) -> Tiles:
    """Return the tiles of attend kernels; these kernels do not depend on a tree's spelling."""
    return Tiles(
        config.num_heads,
        "tree" if config.is_tree else config.mask,
        config.tree_words,
        variant.tile_m,
        variant.tile_n,
        _fixed_splits(config, variant),
    )


def _fixed_splits(config: MlaConfig, variant: AttendVariant) -> int:
    """Return the maximum splits of a row, or 0 without ``batch_invariant``."""
    if not config.batch_invariant:
        return 0
    return fixed_splits(variant, config.max_rows, config.kv_lora_rank)
