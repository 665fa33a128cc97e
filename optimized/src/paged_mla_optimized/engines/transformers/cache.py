"""The library's cache interface over rows of a pool."""

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
    """One layer of a :class:`PagedMlaCache`, whose layers have all lengths in common."""

    is_croppable = True
    is_sliding = False

    def __init__(self, rows: Rows, index: int) -> None:
        self._rows, self._index = rows, index  # what the mixin would set is read from the pool

    @property
    def is_initialized(self) -> bool:
        """Whether tokens are cached."""
        return self._rows.columns > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """Latents, dtype [B, 1, columns, R], as the library's own cache has them; a copy.

        0 for padding; ``None`` where nothing is cached.
        """
        return None if (found := self._gathered()) is None else found[..., : self._rank]

    @property
    def values(self) -> torch.Tensor | None:
        """Rotated keys, dtype [B, 1, columns, P]; otherwise as :attr:`keys`."""
        return None if (found := self._gathered()) is None else found[..., self._rank :]

    @property
    def _rank(self) -> int:
        return self._rows.pool.config.kv_lora_rank

    def _gathered(self) -> torch.Tensor | None:
        return self._rows.gathered(self._index).unsqueeze(1) if self.is_initialized else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Latents, torch.Tensor]:
        """Return what the attention is to append and attend to.

        Parameters
        ----------
        key_states : dtype [B, 1, T, R]
        value_states : dtype [B, 1, T, P]
        """
        chosen = self._rows.pool.model_config._attn_implementation
        if chosen != NAME:
            allowed = f'model.set_attn_implementation("{NAME}")'
            raise InvalidArgument("attn_implementation", chosen, allowed)
        self._rows.pool.check_expansion(self._index)  # which is called next
        return Latents(self._rows, self._index, key_states, value_states), value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns a step sees, and the first of them."""
        return self._rows.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns cached, padding included."""
        return self._rows.columns

    def get_max_length(self) -> int:
        """Return the tokens that a row may have."""
        return self._rows.pool.config.max_model_len

    def _refuse(self, *_args: Any) -> NoReturn:
        """Refuse what would change one layer alone, whose rows are those of all layers.

        Raises
        ------
        Unsupported
            Always.
        """
        raise Unsupported("one layer of a PagedMlaCache by itself: call the cache's own method")

    reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse

    def offload(self) -> NoReturn:
        """Refuse to move away.

        Raises
        ------
        Unsupported
            Always.
        """
        raise Unsupported("offloading: blocks of several caches lie in one pool")

    prefetch = offload


class PagedMlaCache(Cache):
    """Rows of one batch in the blocks of a pool; give it to ``generate`` as `cache`.

    Releases of transformers before 5.24 call that argument `past_key_values`.

    ``copy.deepcopy``, :meth:`batch_repeat_interleave`, :meth:`batch_select_indices` and
    :meth:`reorder_cache` copy no latents: rows share blocks until they are written to. Blocks are
    free again after :meth:`reset`, or once the cache is dropped.

    Parameters
    ----------
    pool : LatentPool

    Raises
    ------
    InvalidArgument
        `pool` is none.
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
        """Forget all tokens, and free their blocks."""
        self.rows.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many columns at the end; written as the library does, below 0.

        Raises
        ------
        InvalidArgument
            It is above 0, which meant a length to older releases.
        """
        if tokens_to_remove > 0:
            raise InvalidArgument("tokens_to_remove", int(tokens_to_remove), "<= 0")
        self.rows.crop(-int(tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i go on from what row ``beam_idx[i]`` holds; an empty cache has none to reorder.

        Raises
        ------
        InvalidArgument
            There is no such row.
        """
        if self.rows.columns > 0:
            count = len(self.rows.blocks)
            missing = [row for row in beam_idx.tolist() if row not in range(count)]
            if missing:
                raise InvalidArgument("beam_idx", missing[0], f"0 to {count - 1}")
            self.rows.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each row be there `repeats` times, at least once."""
        check_at_least(1, repeats=repeats)
        rows = range(len(self.rows.blocks))
        self.rows.select([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, by number or by a mask; an empty cache has none to choose from."""
        if self.rows.columns > 0:
            rows = torch.arange(len(self.rows.blocks))
            self.rows.select(rows[indices.cpu()].tolist())
