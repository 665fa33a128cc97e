"""The tensors that a captured step reads: fixed addresses, sized for the largest step."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from paged_mla_optimized.config.arguments import (
    check_between,
    check_int32,
    check_kind,
    device_of,
    integer,
    is_number,
    take_integers,
)
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.limits import MAX_MODEL_LEN, MAX_ROWS, MAX_TOKENS
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.tensors.checks import check_tensor
from paged_mla_optimized.tensors.masks import mask_buffer
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tensors.values.steps import check_step_values
from paged_mla_shared.errors import InvalidArgument

TokenInput: TypeAlias = (
    tuple[tuple[int, ...], torch.dtype] | tuple[tuple[int, ...], torch.dtype, float | None]
)
_NO_BLOCK = 2**31 - 1
_OF_STEPS = ("cu_seqlens_q", "seq_lens", "block_table", "mask")  # inputs of every step


@dataclass(frozen=True)
class Bucket:
    """The fixed shape of a captured step: T tokens in B rows, padding included.

    Parameters
    ----------
    tokens, rows : int
        T, 0 to 2^23, and B, 0 to 32766.
    max_query_len : int or None
        The longest query, which chooses the kernel as in :class:`MlaStep`; 1 to 2^23.

    Raises
    ------
    InvalidArgument
        A value is not an integer or is outside its range.
    """

    tokens: int
    rows: int
    max_query_len: int | None = None

    def __post_init__(self) -> None:
        take_integers(self, "tokens", "rows")
        check_between(0, MAX_TOKENS, tokens=self.tokens)
        check_between(0, MAX_ROWS, rows=self.rows)
        if self.max_query_len is not None:
            take_integers(self, "max_query_len")
            check_between(1, MAX_TOKENS, max_query_len=self.max_query_len)

    @property
    def size(self) -> tuple[int, int, float]:
        """The largest step of the bucket: tokens, rows, and the longest query of a row."""
        longest = math.inf if self.max_query_len is None else self.max_query_len
        return self.tokens, self.rows, longest


@dataclass(frozen=True)
class StepView:
    """The leading part of :class:`StepInputs` that a step of one bucket reads.

    Parameters
    ----------
    bucket : Bucket
    cu_seqlens_q : int32 [B + 1]
    seq_lens : int32 [B]
    block_table : int32 [B, M]
    mask : bool [..], uint8 [T, W], or None
    tokens : dict of [T, ..]
        The engine's own tensors, by name.
    """

    bucket: Bucket
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    mask: torch.Tensor | None
    tokens: dict[str, torch.Tensor]

    @property
    def step(self) -> MlaStep:
        """The step for ``plan``, with the sizes of the bucket."""
        return MlaStep(
            self.cu_seqlens_q,
            self.seq_lens,
            self.block_table,
            num_tokens=self.bucket.tokens,
            max_query_len=self.bucket.max_query_len,
            mask=self.mask,
        )


class StepInputs:
    """The metadata and per-token tensors of a step, padded according to rules S-2 and S-6.

    An engine writes the tensors itself, or calls :meth:`load`. Neither waits for the device.

    Parameters
    ----------
    config : MlaConfig
        Determines the capacities and the mask. The blocks in a ``ContextParallelMla``'s tables have
        the tokens of all ranks: use ``replace(config, block_size=config.block_size * world)``.
    device : torch.device
    tokens : dict of name to ([T, ..], dtype) or ([T, ..], dtype, padding)
        Further tensors with one line for each token; T is ``max_query_tokens``. `padding` fills the
        lines of padded tokens. By default, or with ``None``, it is 0, or -1 for signed integers,
        because 0 can be a valid slot, block or row and -1 cannot. Token ids that index an
        embedding need a `padding` that is a valid id: ``"ids": ((T,), torch.int64, 0)``.
    table_width : int or None
        M, 1 to 2^30; ``None`` uses the width that ``max_model_len`` requires.
    pad_seq_len, pad_block : int
        Length and block of a padded row: length 0, or length 1 and a block that may be read. The
        latter serves engines with other kernels that do not accept an empty row.

    Raises
    ------
    InvalidArgument
        A size is outside its range; or an entry of `tokens` does not have ``max_query_tokens``
        lines, has the name of a tensor that every step has, or has a padding that its dtype cannot
        represent.
    Unsupported
        The device is not available.
    """

    def __init__(
        self,
        config: MlaConfig,
        device: torch.device | str,
        tokens: Mapping[str, TokenInput],
        *,
        table_width: int | None = None,
        pad_seq_len: int = 0,
        pad_block: int = 0,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if integer("pad_seq_len", pad_seq_len) not in {0, 1}:
            raise InvalidArgument("pad_seq_len", pad_seq_len, "0 or 1")
        check_kind("config", config, MlaConfig)
        check_kind("tokens", tokens, Mapping)
        check_int32("pad_block", pad_block)
        if table_width is not None:
            check_between(1, MAX_MODEL_LEN, table_width=table_width)
        self.config, device = config, device_of(device)
        self._switch = CheckSwitch(device)
        self.pad_seq_len, self.pad_block = pad_seq_len, pad_block
        rows, width = config.max_rows, table_width or -(-config.max_model_len // config.block_size)
        self.cu_seqlens_q = zeros(rows + 1, dtype=torch.int32)
        self.seq_lens = zeros(rows, dtype=torch.int32)
        self.block_table = zeros(rows, width, dtype=torch.int32)
        self.mask = mask_buffer(config, device)
        self.tokens: dict[str, torch.Tensor] = {}
        self._padding: dict[str, float] = {}
        self.loaded_rows = 0
        """Rows of the step that :meth:`load` copied last; 0 after :meth:`clear`."""
        for name, declared in tokens.items():
            if name in _OF_STEPS:
                raise InvalidArgument("tokens", name, f"a name other than {', '.join(_OF_STEPS)}")
            shape, dtype, padding = _declaration(name, declared)
            if shape[:1] != (config.max_query_tokens,):
                allowed = f"max_query_tokens = {config.max_query_tokens} lines"
                raise InvalidArgument(name, f"shape {[*shape]}", allowed)
            self.tokens[name] = zeros(*shape, dtype=dtype)
            self._padding[name] = padding
        self.clear()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor; no two of them share memory."""
        fixed = [self.cu_seqlens_q, self.seq_lens, self.block_table, *self.tokens.values()]
        return fixed if self.mask is None else [*fixed, self.mask]

    def view(self, bucket: Bucket) -> StepView:
        """Return the part that a bucket reads; raise ``InvalidArgument`` if it does not fit."""
        check_kind("bucket", bucket, Bucket)
        config = self.config
        if bucket.rows > config.max_rows:
            raise InvalidArgument("rows", bucket.rows, f"0 to max_rows = {config.max_rows}")
        if bucket.tokens > config.max_query_tokens:
            allowed = f"0 to max_query_tokens = {config.max_query_tokens}"
            raise InvalidArgument("tokens", bucket.tokens, allowed)
        mask = self.mask
        if mask is not None and config.mask == "tree:packed":
            mask = mask[: bucket.tokens]
        return StepView(
            bucket,
            self.cu_seqlens_q[: bucket.rows + 1],
            self.seq_lens[: bucket.rows],
            self.block_table[: bucket.rows],
            mask,
            {name: tensor[: bucket.tokens] for name, tensor in self.tokens.items()},
        )

    def clear(self) -> None:
        """Make the step idle: no row has a query token, so a step reads and writes no token.

        All lines of named tensors become padding.
        """
        self.loaded_rows = 0
        self.cu_seqlens_q.zero_()
        self.seq_lens.fill_(self.pad_seq_len)
        self.block_table.fill_(self.pad_block)
        for name, tensor in self.tokens.items():
            tensor.fill_(self._padding[name])

    def poison(self) -> None:
        """Fill every tensor with values that no step may depend on.

        The values are NaN, 2^31 - 1 in int32 tensors, and 1 in other tensors. Call :meth:`load` or
        :meth:`clear` before the next step.
        """
        for tensor in self.tensors:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            else:
                tensor.fill_(_NO_BLOCK if tensor.dtype is torch.int32 else 1)

    def load(self, step: MlaStep, tokens: Mapping[str, torch.Tensor] | None = None) -> None:
        """Copy a step into the tensors and pad the rest for every bucket, without waiting.

        Tensors must be on the device, or in pinned host memory and contiguous; a copy from other
        memory waits. The lines of a named tensor after the passed lines are filled with its
        padding. A named tensor that is not passed stays unchanged: if the engine writes it in
        place, the engine also writes the padding after the step's tokens. A row with more keys than
        the block table has space for becomes padding.

        With ``PAGED_MLA_CHECK=1`` the values are first checked against the rules, which waits for
        them. A tensor named ``slot_mapping`` then has the slots that tokens are written to.

        Parameters
        ----------
        step : MlaStep
            A step with a block table. The bucket determines the kernel; ``max_query_len`` and
            ``query_lens`` are ignored.
        tokens : mapping of str to [T, ..], or None
            Tensors that were named at construction; T is ``step.num_tokens``.

        Raises
        ------
        InvalidArgument
            A tensor's shape or dtype is wrong, it is larger than its buffer, it does not have one
            line for each token, or it overlaps a buffer of the inputs without being that buffer;
            a mask is missing or not allowed; a name of `tokens` is unknown; or a checked value
            breaks a rule. Nothing has been copied then.
        """
        check_kind("step", step, MlaStep)
        check_kind("block_table", step.block_table, torch.Tensor)
        if tokens is not None:
            check_kind("tokens", tokens, Mapping)
        tokens = dict(tokens or {})
        self._check(step, tokens)
        if self._switch.is_on:
            slots = tokens.get("slot_mapping")
            check_step_values(self.config, step, slot_mapping=slots)
        cu_seqlens_q, seq_lens, mask = step.cu_seqlens_q, step.seq_lens, step.mask
        block_table = step.block_table
        assert isinstance(block_table, torch.Tensor)
        rows, width = block_table.shape
        self.loaded_rows = rows
        self.cu_seqlens_q[: rows + 1].copy_(cu_seqlens_q, non_blocking=True)
        self.cu_seqlens_q[rows + 1 :].copy_(self.cu_seqlens_q[rows])
        self.seq_lens[:rows].copy_(seq_lens, non_blocking=True)
        self.seq_lens[rows:].fill_(self.pad_seq_len)
        self.block_table[:rows, :width].copy_(block_table, non_blocking=True)
        self.block_table[rows:, :1].fill_(self.pad_block)
        self._leave_out_rows_past(step.most_keys(self.config.block_size))
        if mask is not None and self.mask is not None:
            place = self.mask[: len(mask)]
            if mask.ndim == 2:  # bits past the longest draft are unused
                mask = mask.to(place.device, non_blocking=True)[:, : place.shape[1]]
            place.copy_(mask, non_blocking=True)
        for name, tensor in tokens.items():
            room = self.tokens[name]
            room[: len(tensor)].copy_(tensor.detach(), non_blocking=True)
            room[len(tensor) :].fill_(self._padding[name])

    def _leave_out_rows_past(self, longest: int) -> None:
        """Turn rows that are longer than the table allows into padding, as ``plan`` would.

        The columns after the step's table have blocks of an earlier step, perhaps of another
        request.
        """
        if longest < self.config.max_model_len:
            lens = self.seq_lens[: self.loaded_rows]
            lens.masked_fill_(lens > longest, 0)

    def _check(self, step: MlaStep, tokens: dict[str, torch.Tensor]) -> None:
        """Check that the arguments of :meth:`load` fit the buffers."""
        seq_lens, cu_seqlens_q, block_table = step.seq_lens, step.cu_seqlens_q, step.block_table
        assert isinstance(block_table, torch.Tensor)
        mask, num_tokens = step.mask, integer("num_tokens", step.num_tokens)
        check_between(0, self.config.max_query_tokens, num_tokens=num_tokens)
        _check_fits("seq_lens", seq_lens, (None,), self.seq_lens)
        rows = len(seq_lens)
        _check_fits("cu_seqlens_q", cu_seqlens_q, (rows + 1,), self.cu_seqlens_q)
        _check_fits("block_table", block_table, (rows, None), self.block_table)
        if (mask is None) != (self.mask is None):
            given, allowed = (None, "a mask") if mask is None else ("a mask", None)
            raise InvalidArgument(
                "mask", given, f"{allowed}, since the config's mask is {self.config.mask}"
            )
        if mask is not None and self.mask is not None:
            check_kind("mask", mask, torch.Tensor)
            is_packed = mask.ndim == self.mask.ndim == 2
            lines = mask[:, : self.mask.shape[1]] if is_packed else mask
            _check_fits("mask", lines, (None, *self.mask.shape[1:]), self.mask)
        for name, tensor in tokens.items():
            if name not in self.tokens:
                raise InvalidArgument(name, "a tensor", f"tensors with the names {[*self.tokens]}")
            room = self.tokens[name]
            _check_fits(name, tensor, (num_tokens, *room.shape[1:]), room)
        if mask is not None and mask.ndim == 2 and len(mask) < num_tokens:
            # The missing tokens would keep the lines of an earlier step.
            given, allowed = f"{len(mask)} lines", f"one line for each of {num_tokens} tokens"
            raise InvalidArgument("mask", given, allowed)
        named = {"cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens, "block_table": block_table}
        own = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
        for name, source in (named | tokens | {"mask": mask}).items():
            if source is None or source.numel() == 0:
                continue
            if source.untyped_storage().data_ptr() in own and not self._is_in_place(name, source):
                allowed = f"memory of another tensor, or the beginning of the inputs' own {name}"
                raise InvalidArgument(name, "memory of the inputs themselves", allowed)

    def _is_in_place(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is already the beginning of its buffer."""
        room = self.tokens[name] if name in self.tokens else getattr(self, name)
        return bool(tensor.data_ptr() == room.data_ptr() and tensor.stride() == room.stride())


def _declaration(name: str, declared: Any) -> tuple[tuple[int, ...], torch.dtype, float]:
    """Return the shape, dtype and padding of a named tensor, after checks."""
    is_declared = isinstance(declared, (tuple, list)) and len(declared) in {2, 3}
    shape, dtype, padding = (*declared, None)[:3] if is_declared else (None, None, None)
    is_shape = isinstance(shape, (tuple, list)) and all(
        isinstance(size, numbers.Integral) and int(size) >= 0 for size in shape
    )
    if not is_shape or not isinstance(dtype, torch.dtype):
        raise InvalidArgument(name, repr(declared), "(shape, dtype) or (shape, dtype, padding)")
    default: float
    if dtype is torch.bool:
        default, holds = False, isinstance(padding, bool)
    elif dtype.is_floating_point or dtype.is_complex:
        default, most = 0, torch.finfo(dtype).max
        holds = is_number(padding) and not most < abs(padding) < math.inf
    else:
        limits = torch.iinfo(dtype)
        default, is_integer = max(limits.min, -1), isinstance(padding, numbers.Integral)
        holds = is_integer and is_number(padding) and limits.min <= padding <= limits.max
    if padding is None:
        return tuple(shape), dtype, default
    if not holds:
        raise InvalidArgument(name, f"padding {padding!r}", f"a value that {dtype} can represent")
    return tuple(shape), dtype, padding


def _check_fits(
    name: str, tensor: torch.Tensor | None, shape: tuple[int | None, ...], room: torch.Tensor
) -> None:
    """Check a tensor on any device against a shape, and the dtype and size of its buffer."""
    if tensor is None:
        raise InvalidArgument(name, None, f"a tensor of {room.dtype}")
    check_tensor(name, tensor, shape, room.dtype, None)
    if any(size > most for size, most in zip(tensor.shape, room.shape, strict=True)):
        raise InvalidArgument(name, f"shape {list(tensor.shape)}", f"at most {list(room.shape)}")
