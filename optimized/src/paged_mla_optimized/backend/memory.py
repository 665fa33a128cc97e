"""A problem's cache on the device, as the suite's bytes and as the tensors of kernels."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.backend.places import Places
from paged_mla_optimized.config.attention import TORCH_DTYPES
from paged_mla_optimized.runtime.arrays import to_numpy, to_torch
from paged_mla_optimized.tensors.latent_cache import ROW_DTYPES, LatentCache
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import SCALE_DTYPE
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Problem


class Memory:
    """One cache, which is filled with zeros at first.

    Attributes
    ----------
    cache : LatentCache
        Views of the cache's bytes.
    """

    def __init__(self, problem: Problem, device: torch.device, places: Places) -> None:
        self._layout = layout = problem.layout
        blocks, stored = layout.num_blocks, layout.format
        scale_bytes = stored.scale_bytes(layout.block_size)
        shape = (blocks, layout.block_stride)
        self._storage = places.room("the cache", shape, torch.uint8).zero_()
        self._scales = places.room("the scales", (blocks, scale_bytes), torch.uint8).zero_()
        scales, of_scales = None, stored.scale_shape(blocks, layout.block_size)
        if of_scales is not None:
            scales = torch.tensor(layout.scale, dtype=TORCH_DTYPES[SCALE_DTYPE], device=device)
            scales = self._scales.view(scales.dtype).view(of_scales) if of_scales else scales
        self.cache = LatentCache(stored.name, self._latents(), scales)

    def load(self, image: CacheImage) -> None:
        """Make the cache equal to `image`, in place; only live blocks are copied from the host."""
        layout, device = self._layout, self._storage.device
        if image.layout != layout:
            raise InvalidArgument(
                "image", "an image with another layout", "the layout of the problem"
            )
        poison = to_torch("poison", image.poison, device)
        self._storage.view(-1, len(poison)).copy_(poison)
        scale_poison = image.poisoned_block[layout.block_stride :]
        self._scales.copy_(to_torch("poison", scale_poison, device))
        ids = to_torch("block_ids", image.block_ids, device)
        blocks = to_torch("blocks", image.blocks, device)
        self._storage[ids] = blocks[:, : layout.block_stride]
        self._scales[ids] = blocks[:, layout.block_stride :]

    def read(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the raw bytes of blocks, uint8 [n, block_bytes]."""
        ids = to_torch("block_ids", block_ids, self._storage.device)
        return to_numpy(torch.cat([self._storage[ids], self._scales[ids]], dim=1))

    def _latents(self) -> torch.Tensor:
        """Return the storage as [num_blocks, block_size, width]."""
        layout = self._layout
        dtype, width = layout.format.row(layout.dims)
        elements = self._storage.view(-1).view(ROW_DTYPES[dtype])
        itemsize = elements.element_size()
        return elements.as_strided(
            (layout.num_blocks, layout.block_size, width),
            (layout.block_stride // itemsize, layout.token_stride // itemsize, 1),
        )
