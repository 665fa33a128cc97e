"""Ways to generate, each compared with the library's cache and eager attention in float32."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from hf_forms import assert_counts, rows_in
from hf_models import PAD, TINY, VOCAB, Kind, Size, build, paged

from paged_mla_optimized.engines.transformers import PagedMlaCache

KIND = Kind("v3", yarn=True, form="both")
NEW = 8


class Pair:
    """One model twice: with the library's attention and with ours."""

    def __init__(self, size: Size) -> None:
        self.model = build(KIND, size)
        self.ours, self.pool = paged(self.model, KIND.block_size)
        self.generator = torch.Generator().manual_seed(5)

    def tokens(self, *shape: int) -> torch.Tensor:
        ids = torch.randint(1, VOCAB, shape, generator=self.generator)
        return ids.to(self.model.device)

    def ragged(self) -> dict[str, torch.Tensor]:
        """Return three prompts, padded on the left."""
        ids = self.tokens(3, 19)
        mask = torch.ones_like(ids)
        for row, padding in enumerate((0, 12, 5)):
            ids[row, :padding], mask[row, :padding] = PAD, 0
        return {"input_ids": ids, "attention_mask": mask}

    def assert_equal(self, inputs, cache: PagedMlaCache | None = None, **options) -> None:
        """Generate with both, from the same random numbers."""
        options = {"max_new_tokens": NEW, "do_sample": False, **options}
        cache = PagedMlaCache(self.pool) if cache is None else cache
        torch.manual_seed(1)
        expected = self.model.generate(**inputs, **options)
        torch.manual_seed(1)
        assert torch.equal(self.ours.generate(**inputs, **options, past_key_values=cache), expected)

    def alone(self, length: int) -> dict[str, torch.Tensor]:
        ids = self.tokens(1, length)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def greedy(pair: Pair) -> None:
    pair.assert_equal(pair.ragged())


def sampled(pair: Pair) -> None:
    pair.assert_equal(pair.ragged(), do_sample=True, temperature=0.8, top_k=20)


def several_samples(pair: Pair) -> None:
    pair.assert_equal(pair.ragged(), do_sample=True, num_return_sequences=2)


def beams(pair: Pair) -> None:
    pair.assert_equal(pair.ragged(), num_beams=2)


def chunked_prefill(pair: Pair) -> None:
    pair.assert_equal(pair.ragged(), prefill_chunk_size=7)


def lookup(pair: Pair) -> None:
    """Drafts copied from the prompt, verified several at a time, rejected ones cropped."""
    inputs = pair.alone(6)
    inputs = {name: tensor.repeat(1, 3) for name, tensor in inputs.items()}
    pair.assert_equal(inputs, prompt_lookup_num_tokens=3, max_new_tokens=12)


def assistant(pair: Pair) -> None:
    """Drafts of another model, which keeps the library's own cache."""
    draft = build(KIND, replace(TINY, device=pair.model.device.type), seed=3)
    pair.assert_equal(pair.alone(11), assistant_model=draft)


def own_drafts(pair: Pair) -> None:
    """Drafts of the model itself, all of which are right."""
    pair.assert_equal(pair.alone(11), assistant_model=pair.model)


def next_turns(pair: Pair) -> None:
    """A conversation goes on in the cache of its last turn."""
    cache, ids = PagedMlaCache(pair.pool), pair.tokens(1, 9)
    for _ in range(3):
        mask = torch.ones_like(ids)
        inputs = {"input_ids": ids, "attention_mask": mask}
        pair.assert_equal(inputs, cache, max_new_tokens=3)
        ids = torch.cat([ids, pair.tokens(1, 7)], dim=1)
        cache.crop(-(cache.get_seq_length() - inputs["input_ids"].shape[1]))


def copied_prefix(pair: Pair) -> None:
    """A prompt's cache is copied for each question about it, and holds no block twice."""
    prefix, cache = pair.tokens(1, 35), PagedMlaCache(pair.pool)
    with torch.no_grad():
        pair.ours(prefix, past_key_values=cache)
    free = pair.pool.num_free
    for length in (3, 1, 20):
        ids = torch.cat([prefix, pair.tokens(1, length)], dim=1)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        twin = copy.deepcopy(cache)
        assert pair.pool.num_free == free
        pair.assert_equal(inputs, twin)
        del twin
    assert cache.get_seq_length() == 35


def repeated_prefix(pair: Pair) -> None:
    """A prompt's cache becomes that of a batch of ragged questions, padded behind the prefix."""
    prefix, cache = pair.tokens(1, 35), PagedMlaCache(pair.pool)
    with torch.no_grad():
        pair.ours(prefix, past_key_values=cache)
    cache.batch_repeat_interleave(3)
    rest = pair.ragged()
    inputs = {
        "input_ids": torch.cat([prefix.repeat(3, 1), rest["input_ids"]], dim=1),
        "attention_mask": torch.cat(
            [torch.ones_like(prefix).repeat(3, 1), rest["attention_mask"]], dim=1
        ),
    }
    pair.assert_equal(inputs, cache)


def fewer_rows(pair: Pair) -> None:
    """Rows that are done with leave the batch."""
    inputs, cache = pair.ragged(), PagedMlaCache(pair.pool)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        pair.ours(**inputs, position_ids=positions, past_key_values=cache)
    kept = torch.tensor([2, 0])
    cache.batch_select_indices(kept)
    rows = {name: tensor[kept.to(tensor.device)] for name, tensor in inputs.items()}
    longer = {
        "input_ids": torch.cat([rows["input_ids"], pair.tokens(2, 4)], dim=1),
        "attention_mask": torch.nn.functional.pad(rows["attention_mask"], (0, 4), value=1),
    }
    pair.assert_equal(longer, cache)


WAYS = {
    way.__name__: way
    for way in (
        *(greedy, sampled, several_samples, beams, chunked_prefill, lookup, assistant, own_drafts),
        *(next_turns, copied_prefix, repeated_prefix, fewer_rows),
    )
}


def assert_way(way: str, size: Size) -> None:
    """Generate in one way; afterwards no block is left behind."""
    pair = Pair(size)
    with rows_in(KIND.form, pair.pool) as counts:
        WAYS[way](pair)
    assert_counts(counts, KIND.form)
    assert pair.pool.num_free == pair.pool.latents.shape[1]
