"""The cache interface of the transformers library over the rows of a pool."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from paged_mla_optimized.config.arguments import check_at_least, check_kind
from paged_mla_optimized.engines.transformers.attention import NAME, Latents
from paged_mla_optimized.engines.transformers.pool import LatentPool
from paged_mla_optimized.engines.transformers.rows import Rows
from paged_mla_shared.errors import InvalidArgument, Unsupported


class PagedMlaCacheLayer(CacheLayerMixin):
    """One layer of a :class:`PagedMlaCache`. All layers of a cache have the same lengths."""

    is_croppable = True
    is_sliding = False

    def __init__(self, rows: Rows, index: int) -> None:
        # The mixin's constructor is not called: this class reads its attributes from the pool.
        self._rows, self._index = rows, index

    @property
    def is_initialized(self) -> bool:
        """Whether tokens are cached."""
        return self._rows.columns > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of the latents, dtype [B, 1, columns, R], in the layout of the library's cache.

        Padding is 0. The value is ``None`` if no token is cached.
        """
        return None if (found := self._gathered()) is None else found[..., : self._rank]

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of the rotated keys, dtype [B, 1, columns, P]; otherwise like :attr:`keys`."""
        return None if (found := self._gathered()) is None else found[..., self._rank :]

    @property
    def _rank(self) -> int:
        return self._rows.pool.config.kv_lora_rank

    def _gathered(self) -> torch.Tensor | None:
        return self._rows.gathered(self._index).unsqueeze(1) if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is already allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Latents, torch.Tensor]:
        """Return the new latents for the attention function, which appends and attends to them.

        Parameters
        ----------
        key_states : dtype [B, 1, T, R]
            The latents of the new tokens.
        value_states : dtype [B, 1, T, P]
            Their rotated keys.

        Raises
        ------
        InvalidArgument
            The model uses another attention implementation.
        Unsupported
            The module has another ``expand_kv`` than the library.
        """
        chosen = self._rows.pool.model_config._attn_implementation
        if chosen != NAME:
            allowed = f'the attention of the pool; call model.set_attn_implementation("{NAME}")'
            raise InvalidArgument("attn_implementation", chosen, allowed)
        self._rows.pool.check_expansion(self._index)  # the module calls expand_kv next
        return Latents(self._rows, self._index, key_states, value_states), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns in the mask of a step, and the first column, 0."""
        return self._rows.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of cached columns, padding included."""
        return self._rows.columns

    def get_max_length(self) -> int:
        """Return the largest number of tokens of a row."""
        return self._rows.pool.config.max_model_len

    def _refuse(self, *_args: Any) -> NoReturn:
        """Reject a change of one layer, because all layers share their rows.

        Raises
        ------
        Unsupported
            Always.
        """
        raise Unsupported(
            "one layer of a PagedMlaCache cannot be changed alone; call the method of the cache"
        )

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse

    def offload(self) -> NoReturn:
        """Reject offloading.

        Raises
        ------
        Unsupported
            Always.
        """
        raise Unsupported(
            "offloading is not supported by PagedMlaCache, because several caches share the "
            "blocks of one pool; generate without offloading"
        )

    prefetch = offload


class PagedMlaCache(Cache):
    """The rows of one batch in the blocks of a pool; pass it to ``generate`` as `cache`.

    Releases of transformers before 5.24 call that argument `past_key_values`.

    ``copy.deepcopy``, :meth:`batch_repeat_interleave`, :meth:`batch_select_indices` and
    :meth:`reorder_cache` copy no latents: rows share blocks until one of them writes to a block.
    The blocks are free again after :meth:`reset`, or when the cache is deleted.

    Parameters
    ----------
    pool : LatentPool

    Raises
    ------
    InvalidArgument
        `pool` is not a :class:`LatentPool`.
    """

    def __init__(self, pool: LatentPool) -> None:
        check_kind("pool", pool, LatentPool)
        self._take(Rows(pool))

    def _take(self, rows: Rows) -> None:
        self.rows = rows
        layers = rows.pool.latents.shape[0]
        super().__init__(layers=[PagedMlaCacheLayer(rows, layer) for layer in range(layers)])

    def __reduce__(self) -> NoReturn:
        self.rows.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedMlaCache:
        twin = type(self).__new__(type(self))
        twin._take(self.rows.fork())
        memo[id(self)] = twin
        return twin

    def reset(self) -> None:
        """Remove all tokens, and free their blocks."""
        self.rows.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns.

        Parameters
        ----------
        tokens_to_remove : int
            The negated number of columns, 0 or below, as in the library's caches.

        Raises
        ------
        InvalidArgument
            The value is above 0. Older releases of the library interpreted it as a length.
        """
        if tokens_to_remove > 0:
            raise InvalidArgument(
                "tokens_to_remove",
                int(tokens_to_remove),
                "<= 0, the negated number of columns to remove",
            )
        self.rows.crop(-int(tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i continue from the tokens of row ``beam_idx[i]``.

        The method does nothing for an empty cache.

        Raises
        ------
        InvalidArgument
            An index is not the number of a row.
        """
        if self.rows.columns > 0:
            count = len(self.rows.blocks)
            missing = [row for row in beam_idx.tolist() if row not in range(count)]
            if missing:
                raise InvalidArgument("beam_idx", missing[0], f"0 to {count - 1}")
            self.rows.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace each row by `repeats` copies of it.

        Raises
        ------
        InvalidArgument
            `repeats` is not an integer or is below 1.
        """
        check_at_least(1, repeats=repeats)
        rows = range(len(self.rows.blocks))
        self.rows.select([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows that `indices` selects, by number or by a boolean mask.

        The method does nothing for an empty cache.
        """
        if self.rows.columns > 0:
            rows = torch.arange(len(self.rows.blocks))
            self.rows.select(rows[indices.cpu()].tolist())
