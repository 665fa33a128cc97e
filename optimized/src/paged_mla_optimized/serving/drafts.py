"""The steps of a draft model: tensors of fixed shapes for ``plan``, filled on the device."""

from __future__ import annotations

import numpy as np
import torch
import triton

from paged_mla_optimized.config.arguments import check_between, device_of, integer
from paged_mla_optimized.config.limits import MAX_BLOCK_SIZE, MAX_DRAFT_TABLE, MAX_ROWS, MAX_TOKENS
from paged_mla_optimized.kernels.common.drafts import copy_tails_kernel, draft_rows_kernel
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.runtime.kernel_spec import DENSE, KernelSpec, number, pointer
from paged_mla_optimized.tensors.checks import check_scales, check_tensor, check_written_cache
from paged_mla_optimized.tensors.latent_cache import (
    Cache,
    LatentCache,
    blocks_of_cache,
    tensors_of_blocks,
)
from paged_mla_optimized.tensors.overlap import check_apart
from paged_mla_optimized.tensors.values.blocks import Paging, Table
from paged_mla_shared.errors import InvalidArgument

_ENTRIES_PER_PROGRAM = 512
_TOKENS_PER_PROGRAM = 8
_MOST_A_ROW = 2**16
"""The largest number of steps, and of own blocks of a row; their sum over rows fits int32."""


class ExtendWindow:
    """Draft-extend: a step of `window` tokens of every request, for all accepted lengths (S-16).

    Parameters
    ----------
    max_rows, window : int
        B, 1 to 32766, and the tokens of each row, >= 1; their product is at most 2^23.
    device : torch.device

    Attributes
    ----------
    cu_seqlens_q : int32 [max_rows + 1]
    seq_lens : int32 [max_rows]

    Raises
    ------
    InvalidArgument
        A size is outside its range.
    Unsupported
        The device is not available.
    """

    def __init__(self, max_rows: int, window: int, device: torch.device | str) -> None:
        check_between(1, MAX_ROWS, max_rows=max_rows)
        check_between(1, MAX_TOKENS // max_rows, window=window)
        self.window, device = integer("window", window), device_of(device)
        ends = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.cu_seqlens_q = ends * self.window
        self.seq_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._switch = CheckSwitch(device)

    def check(self, committed: torch.Tensor) -> None:
        """Check the *values* of a step against the rules; for debugging, since it synchronizes.

        The filled step itself is checked by :meth:`PagedMla.check`.

        Parameters
        ----------
        committed
            As for :meth:`fill`.

        Raises
        ------
        InvalidArgument
            The errors of :meth:`fill`; or a length is below 0, or exceeds int32 with its window.
        """
        self._check(committed)
        most = 2**31 - 1 - self.window
        lens = committed.cpu().numpy()
        outside = (lens < 0) | (lens > most)
        if outside.any():
            row = int(outside.argmax())
            raise InvalidArgument("committed", f"{lens[row]} in row {row}", f"0 to {most}")

    def fill(self, committed: torch.Tensor) -> None:
        """Set :attr:`seq_lens` to the committed lengths, int32 [max_rows], plus the window.

        A committed length of 0 marks a padded row. The window overwrites what an earlier window
        wrote after the accepted tokens.

        Raises
        ------
        InvalidArgument
            `committed` has another shape, dtype or device, or shares memory with :attr:`seq_lens`.
        """
        self._check(committed)
        if self._switch.is_on:
            self.check(committed)
        # Lengths below 0 stay below 0, and sums past int32 wrap to below 0: both are padded rows.
        torch.clamp(committed, min=0, max=1, out=self.seq_lens)
        self.seq_lens.mul_(self.window).add_(committed)

    def _check(self, committed: torch.Tensor) -> None:
        lens = self.seq_lens
        check_tensor("committed", committed, tuple(lens.shape), lens.dtype, lens.device)
        if committed.untyped_storage().data_ptr() == lens.untyped_storage().data_ptr():
            raise InvalidArgument("committed", "the window's own seq_lens", "another tensor")


class DraftSteps:
    """Multi-step drafts with k branches per request: each branch is a row of one token (S-15).

    In step i, row ``b * k + j`` reads the prefix of request b and its own i + 1 drafts. Branches
    share the full blocks of the prefix. Each branch continues in blocks of its own; the first of
    these gets a copy of the prefix's partly filled block (:meth:`copy_tails`).

    To compile the kernels before requests arrive, call :meth:`fill` and :meth:`copy_tails` with
    prefixes of length 0: they do not touch the cache.

    Parameters
    ----------
    max_requests, branches, steps : int
        B, k and the number of steps; all >= 1. ``B * k`` is at most 32766 rows, and `steps` at most
        65536.
    prefix_width, own_width : int
        Columns of the prefix table, and blocks of each branch; >= 0. `own_width` is at most
        65536, and the sum of both at most 33553920.
    block_size : int
        Tokens of a block of the cache, 1 to 32768.
    device : torch.device

    Attributes
    ----------
    cu_seqlens_q : int32 [B * k + 1]
    seq_lens : int32 [steps, B * k]
    block_table : int32 [B * k, prefix_width + own_width]
        The same for all steps; -1 for entries without a block.

    Raises
    ------
    InvalidArgument
        A size is outside its range, or `own_width` is too small for a partly filled block and the
        drafts.
    Unsupported
        No kernel runs on `device`.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        branches: int,
        steps: int,
        prefix_width: int,
        own_width: int,
        block_size: int,
        device: torch.device | str,
    ) -> None:
        check_between(1, MAX_ROWS, max_requests=max_requests)
        check_between(1, MAX_ROWS // max_requests, branches=branches)
        check_between(1, _MOST_A_ROW, steps=steps)
        check_between(1, MAX_BLOCK_SIZE, block_size=block_size)
        check_between(0, _MOST_A_ROW, own_width=own_width)
        check_between(0, MAX_DRAFT_TABLE - own_width, prefix_width=prefix_width)
        max_requests, branches, steps = int(max_requests), int(branches), int(steps)
        own_width, block_size = int(own_width), int(block_size)  # launches reject NumPy integers
        if own_width * block_size < block_size - 1 + steps:
            given = f"{own_width} blocks of {block_size}"
            raise InvalidArgument(
                "own_width", given, f"enough blocks for a partly filled block and {steps} drafts"
            )
        rows, device = max_requests * branches, device_of(device)
        if device.type == "cpu":  # a CPU needs Triton's interpreter
            device_facts(device)
        self._switch = CheckSwitch(device)
        self.block_size = block_size
        self._shape = (max_requests, branches, own_width)
        self.cu_seqlens_q = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros((steps, rows), dtype=torch.int32, device=device)
        self.block_table = torch.full(
            (rows, prefix_width + own_width), -1, dtype=torch.int32, device=device
        )

    def check(
        self,
        prefix_lens: torch.Tensor,
        prefix_table: torch.Tensor,
        branch_blocks: torch.Tensor,
        *,
        num_blocks: int | None = None,
    ) -> None:
        """Check the *values* of a draft against the rules; for debugging, since it synchronizes.

        Parameters
        ----------
        prefix_lens, prefix_table, branch_blocks
            As for :meth:`fill`.
        num_blocks : int or None
            Blocks of the cache; with ``None``, block numbers have no upper limit.

        Raises
        ------
        InvalidArgument
            An argument breaks a rule; the error names it. Examples are a prefix that does not fit
            its table, a prefix that exceeds int32 with its drafts, a block that the cache does not
            have, and a block of a branch that a prefix or another branch has too (S-13, S-15).
            Blocks that no step of the draft reaches are not checked.
        """
        self._check(prefix_lens, prefix_table, branch_blocks)
        num_blocks = blocks_of_cache(num_blocks, None)
        lens = prefix_lens.cpu().numpy()
        if (lens < 0).any():
            row = int((lens < 0).argmax())
            raise InvalidArgument("prefix_lens", f"{lens[row]} in request {row}", "0 or more")
        paging, size = Paging(self.block_size, None), self.block_size
        width = prefix_table.shape[1]
        if (lens > width * size).any():
            row = int((lens > width * size).argmax())
            allowed = f"at most {width * size}, the tokens that prefix_table has columns for"
            raise InvalidArgument("prefix_lens", f"{lens[row]} in request {row}", allowed)
        most = 2**31 - 1 - len(self.seq_lens)
        if (lens > most).any():
            row = int((lens > most).argmax())
            allowed = f"at most {most}, so that lengths with drafts fit int32"
            raise InvalidArgument("prefix_lens", f"{lens[row]} in request {row}", allowed)
        prefixes = Table(paging, lens, lens, prefix_table.cpu().numpy(), "prefix_table")
        prefixes.check(num_blocks)
        _, branches, own_width = self._shape
        reached = np.where(lens > 0, lens % size + len(self.seq_lens), 0).repeat(branches)
        own = branch_blocks.cpu().numpy().reshape(-1, own_width)
        branch_table = Table(paging, reached, reached, own, "branch_blocks")
        branch_table.check(num_blocks)
        branch_table.check_planned_slots()  # a branch writes all blocks that it reaches
        shared = np.intersect1d(branch_table.used[0], prefixes.used[0])
        if shared.size:
            given = f"block {shared[0]}, which a prefix has too"
            raise InvalidArgument("branch_blocks", given, "blocks of one branch only")

    def fill(
        self, prefix_lens: torch.Tensor, prefix_table: torch.Tensor, branch_blocks: torch.Tensor
    ) -> None:
        """Describe all steps of a draft with one kernel launch.

        Parameters
        ----------
        prefix_lens : int32 [B], contiguous
            Committed tokens; 0 marks a padded request, whose branches are padded rows.
        prefix_table : int32 [B, prefix_width]
            Entries after a prefix's blocks are never read.
        branch_blocks : int32 [B, k, own_width], contiguous

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or strides are wrong, or it overlaps a buffer of this
            object.
        """
        _, branches, own_width = self._shape
        steps, rows = self.seq_lens.shape
        width = self.block_table.shape[1]
        own = {"the drafts' block_table": self.block_table, "their seq_lens": self.seq_lens}
        check_apart(own, self._check(prefix_lens, prefix_table, branch_blocks))
        if self._switch.is_on:
            self.check(prefix_lens, prefix_table, branch_blocks)
        with torch.cuda.device(self.block_table.get_device()):
            draft_rows_kernel[(rows, -(-width // _ENTRIES_PER_PROGRAM))](
                prefix_lens,
                prefix_table,
                branch_blocks,
                self.block_table,
                self.seq_lens,
                *prefix_table.stride(),
                branches,
                width - own_width,
                own_width,
                steps,
                rows,
                self.block_size,
                **draft_rows_spec().launched,
            )

    def copy_tails(
        self,
        cache: Cache,
        prefix_lens: torch.Tensor,
        prefix_table: torch.Tensor,
        branch_blocks: torch.Tensor,
    ) -> None:
        """Copy the prefix's partly filled block to each branch; call it once for each cache.

        Bytes and the scales of their tokens are copied; nothing is rounded again.

        Parameters
        ----------
        cache : [num_blocks, block_size, width], or LatentCache
            Any width and strides, but the last stride is 1. An FP8 cache must be a LatentCache,
            whose format determines its scales.
        prefix_lens, prefix_table, branch_blocks : Tensor
            The arguments of :meth:`fill`.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or strides are wrong, the cache overlaps another
            tensor, or it does not have the scales of its format.
        """
        latents, scales = tensors_of_blocks(cache)
        requests, branches, own_width = self._shape
        shape = (None, self.block_size, None)
        device = self.block_table.device
        check_tensor("cache", latents, shape, latents.dtype, device, unit_stride=True)
        if isinstance(cache, LatentCache):
            check_scales(cache, self.block_size, device)
        elif latents.dtype is torch.uint8:
            allowed = "a LatentCache, whose format determines the scales"
            raise InvalidArgument("cache", f"a tensor of {cache.dtype}", allowed)
        check_written_cache(latents, scales)
        lengths = self._check(prefix_lens, prefix_table, branch_blocks)
        check_apart({"cache": latents, "cache.scales": scales}, lengths)
        if self._switch.is_on:
            blocks = latents.shape[0]
            self.check(prefix_lens, prefix_table, branch_blocks, num_blocks=blocks)
        per_block = 0 if scales is None else scales.shape[2]
        width = latents.shape[2]
        chunks = -(-self.block_size // _TOKENS_PER_PROGRAM)
        with torch.cuda.device(latents.get_device()):
            copy_tails_kernel[(requests * branches, chunks)](
                latents,
                latents if scales is None else scales,
                prefix_lens,
                prefix_table,
                branch_blocks,
                *latents.stride()[:2],
                0 if scales is None else scales.stride(0),
                *prefix_table.stride(),
                branches,
                self.block_table.shape[1] - own_width,
                own_width,
                self.block_size,
                width,
                latents.shape[0],
                **copy_tails_spec(latents.dtype, width, self.block_size, per_block).launched,
            )

    def _check(
        self, prefix_lens: torch.Tensor, prefix_table: torch.Tensor, branch_blocks: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Check the arguments that the methods share; return them by name."""
        requests, _, own_width = self._shape
        device = self.block_table.device
        prefix_width = self.block_table.shape[1] - own_width
        check_tensor("prefix_lens", prefix_lens, (requests,), torch.int32, device)
        check_tensor("prefix_table", prefix_table, (requests, prefix_width), torch.int32, device)
        check_tensor("branch_blocks", branch_blocks, self._shape, torch.int32, device)
        for name, tensor in (("prefix_lens", prefix_lens), ("branch_blocks", branch_blocks)):
            if not tensor.is_contiguous():
                raise InvalidArgument(name, f"strides {tensor.stride()}", "a contiguous tensor")
        return {
            "prefix_lens": prefix_lens,
            "prefix_table": prefix_table,
            "branch_blocks": branch_blocks,
        }


def draft_rows_spec() -> KernelSpec:
    """Return the kernel that writes the rows of the drafts."""
    types = {
        "prefix_lens_ptr": "*i32",
        "prefix_table_ptr": "*i32",
        "branch_blocks_ptr": "*i32",
        "table_ptr": "*i32",
        "seq_lens_ptr": "*i32",
    }
    return KernelSpec(draft_rows_kernel, {"ENTRIES": _ENTRIES_PER_PROGRAM}, types)


def copy_tails_spec(
    dtype: torch.dtype, width: int, block_size: int, scales_per_block: int
) -> KernelSpec:
    """Return the kernel that copies blocks of tokens of `width` elements."""
    types = {
        "cache_ptr": pointer(dtype),
        "scales_ptr": "*fp32",
        "prefix_lens_ptr": "*i32",
        "prefix_table_ptr": "*i32",
        "branch_blocks_ptr": "*i32",
        "stride_scales_block": number(scales_per_block),
        "stride_table_col": DENSE,
        "block_size": number(block_size),
    }
    constants = {
        "TOKENS": _TOKENS_PER_PROGRAM,
        "COLUMNS": triton.next_power_of_2(width),
        "SCALES": scales_per_block,
    }
    return KernelSpec(copy_tails_kernel, constants, types)
