"""Merge partial results that ranks exchange as lines of out and lse (rule S-8)."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.merge_lines import merge_lines_kernel
from paged_mla_optimized.runtime.kernel_spec import KernelSpec, pointer
from paged_mla_optimized.runtime.launch import Launcher

_BEHIND = 16  # elements for the lse, which also keep lines aligned
_ROWS = 4


def line_width(config: MlaConfig) -> int:
    """Return the elements of a line: R of an output, and the space for its lse."""
    return config.kv_lora_rank + _BEHIND


def split_lines(config: MlaConfig, lines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the outputs [.., R] and the float32 lse [..] in `lines` [.., line]."""
    rank = config.kv_lora_rank
    words = lines.view(torch.float32)
    return lines[..., :rank], words[..., rank * lines.itemsize // words.itemsize]


class MergeLines:
    """Launcher of ``merge_lines_kernel``.

    Parameters
    ----------
    config : MlaConfig
    """

    def __init__(self, config: MlaConfig) -> None:
        self._lse_unit = config.lse_unit
        self._kernel = Launcher(merge_lines_spec(config))

    def launch(self, lines: torch.Tensor, *, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge dense `lines` [n, heads, T, line] into `out` [T, H, R] and `lse` [T, H].

        Only the first H heads of `lines` are merged.
        """
        num_tokens, num_heads = lse.shape
        strides = (*out.stride()[:2], *lse.stride())
        pairs = num_tokens * num_heads
        self._kernel(
            (-(-pairs // _ROWS), 1, 1),
            strides,
            *(lines, lines.view(torch.float32), out, lse),
            *strides,
            len(lines),
            lines.shape[1] * num_tokens,
            num_tokens,
            pairs,
            self._lse_unit,
        )


def merge_lines_spec(config: MlaConfig) -> KernelSpec:
    """Return the kernel that merges lines."""
    answer = pointer(config.dtype)
    types = {
        "lines_ptr": answer,
        "line_lses_ptr": "*fp32",
        "out_ptr": answer,
        "lse_ptr": "*fp32",
        "lse_unit": "fp32",
    }
    constants = {
        "R": config.kv_lora_rank,
        "LINE": line_width(config),
        "WORD": torch.float32.itemsize // config.dtype.itemsize,
        "ROWS": _ROWS,
    }
    return KernelSpec(merge_lines_kernel, constants, types)
