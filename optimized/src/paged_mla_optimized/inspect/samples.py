"""Choose which layers of a running engine are dumped, and write their files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.arguments import check_at_least, check_kind
from paged_mla_shared.aliases import alias_blocks
from paged_mla_shared.dump import Dump, save_dump


class Samples:
    """Dumps of some layers of some steps, up to a total size.

    Parameters
    ----------
    folder, every, layers, most_bytes
        The arguments of :func:`paged_mla_optimized.record`.

    Attributes
    ----------
    written : list of Path
        One file for each sampled layer of each sampled step, unless the dump did not fit.
    skipped : int
        Number of dumps that did not fit.

    Raises
    ------
    InvalidArgument
        `every` is not an integer or is below 1, or a value of `layers` or `most_bytes` is not an
        integer or is below 0.
    """

    def __init__(
        self, folder: Path | str, every: int, layers: Sequence[int] | None, most_bytes: int
    ) -> None:
        check_at_least(1, every=every)
        check_at_least(0, most_bytes=most_bytes)
        if layers is not None:
            check_kind("layers", layers, Iterable)
            layers = tuple(layers)
            for layer in layers:
                check_at_least(0, layers=layer)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.written: list[Path] = []
        self.skipped = 0
        self._folder, self._every, self._layers = Path(folder), every, layers
        self._room = most_bytes

    def wants_step(self, step: int) -> bool:
        """Return whether a step is sampled.

        No step is sampled in a compiled function or in a graph capture, which cannot wait.
        """
        if torch.compiler.is_compiling() or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return False
        return step >= 0 and step % self._every == 0

    def wants(self, step: int, layer: int) -> bool:
        """Return whether a layer of a step is sampled."""
        return self.wants_step(step) and (self._layers is None or layer in self._layers)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a dump of `num_bytes` fits; otherwise count it as skipped."""
        if num_bytes > self._room:
            self.skipped += 1
            return False
        return True

    def write(self, dump: Dump, name: str) -> None:
        """Write a dump to the folder."""
        path = self._folder / f"{name}.safetensors"
        save_dump(dump, path)
        self._room -= path.stat().st_size
        self.written.append(path)


def blocks_near(
    seq_lens: NDArray[Any], block_table: NDArray[Any], cache: torch.Tensor
) -> NDArray[np.int64]:
    """Return the blocks of the rows and the blocks that faulty kernels may read, sorted, each once.

    These are all entries of the table up to the longest row, for faults that read through the table
    row of another row or past a row's end. In large caches they also include the blocks at which
    offsets arrive when their high bits are lost.

    Parameters
    ----------
    seq_lens : int32 [B]
    block_table : int32 [B, M]
    cache : [num_blocks, block_size, ...]
    """
    columns = -(-int(seq_lens.max(initial=0)) // cache.shape[1])
    blocks = np.unique(block_table[:, :columns]).astype(np.int64)
    blocks = blocks[(blocks >= 0) & (blocks < len(cache))]
    return np.union1d(blocks, alias_blocks(blocks, cache.stride(0), cache.element_size()))
