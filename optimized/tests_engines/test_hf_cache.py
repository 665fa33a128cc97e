"""transformers: what a cache shows of itself, and what it does not do."""

import copy
import pickle

import pytest
import torch
from hf_models import forward, paged
from transformers import DynamicCache

from paged_mla_optimized.engines.transformers import PagedMlaCache, rows
from paged_mla_shared.errors import InvalidArgument, Unsupported

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture(name="ours")
def _ours(model):
    return paged(model, 4, num_blocks=8, max_rows=4)


@pytest.fixture(name="cache")
def _cache(ours):
    """Hold two rows of one forward, one of them padded."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS, cache, attention_mask=MASK)
    return cache


def test_keys_and_values_are_those_of_the_librarys_cache(model, cache):
    """Latents and rotated keys, 0 where the library caches padding."""
    theirs = DynamicCache(config=model.config)
    forward(model, IDS, theirs, attention_mask=MASK)
    for found, expected in zip(cache.layers, theirs.layers, strict=True):
        for name in ("keys", "values"):
            ours, library = getattr(found, name), getattr(expected, name)
            is_token = MASK[:, None, :, None]
            torch.testing.assert_close(ours, library * is_token, rtol=1e-4, atol=1e-5)


def test_it_is_initialised_by_its_first_token(ours, cache):
    _, pool = ours
    assert cache.is_initialized
    cache.reset()
    assert not cache.is_initialized
    assert not PagedMlaCache(pool).is_initialized
    assert cache.layers[0].keys is cache.layers[0].values is None


@pytest.mark.parametrize("save", [pickle.dumps, copy.copy])
def test_a_cache_is_not_pickled(cache, save):
    """A copy of rows that owns no block of its own would free those of the first."""
    for part in (cache, cache.rows):
        with pytest.raises(Unsupported, match=r"copying a PagedMlaCache .*keep the token ids"):
            save(part)
    with pytest.raises(Unsupported, match="copying a PagedMlaCache"):
        pickle.dumps(cache.layers[0])


CALLS = {
    "reset": (),
    "crop": (-1,),
    "reorder_cache": (torch.tensor([1, 0]),),
    "batch_repeat_interleave": (2,),
    "batch_select_indices": (torch.tensor([0]),),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_layer_is_not_changed_by_itself(cache, name):
    """Its rows are those of all layers; the library's own method would change a copy."""
    with pytest.raises(Unsupported, match="one layer of a PagedMlaCache cannot be changed"):
        getattr(cache.layers[0], name)(*CALLS[name])
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("name", ["offload", "prefetch"])
def test_it_is_not_offloaded(cache, name):
    with pytest.raises(Unsupported, match="offloading"):
        getattr(cache.layers[0], name)()


def test_blocks_of_a_cache_are_free_as_python_ends(ours, monkeypatch):
    """Modules, ours among them, are emptied before the last objects go."""
    _, pool = ours
    cache = PagedMlaCache(pool)
    cache.rows.blocks = [pool.take(2)]
    for name in ("itertools", "np"):
        monkeypatch.setattr(rows, name, None)
    del cache
    assert pool.num_free == 8


def test_a_batch_behind_a_prefix_of_one_row(ours):
    """The error names the method that adds rows."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS[:1], cache)
    with pytest.raises(InvalidArgument, match=r"1 rows, as cached; batch_repeat_interleave\(\)"):
        forward(model, IDS[:, :1], cache)
    cache.batch_repeat_interleave(2)
    forward(model, IDS[:, :1], cache)
