"""Which blocks a prefix cache may hand out."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.prefix import (
    ROOT_KEY,
    BlockContent,
    PrefixIndex,
    block_contents,
    block_key,
    block_keys,
)
from paged_mla_reference.rules.rounding import Rounding

TOKENS = list(range(100, 112))


def _filled(tokens, extra_keys=()):
    index = PrefixIndex(4)
    for block, content in enumerate(block_contents(tokens, 4, extra_keys)):
        index.insert(content, 10 + block)
    return index


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_keys(tokens, blocks):
    """S-13: a partly filled block is never shared."""
    assert len(block_keys(TOKENS[:tokens], 4)) == blocks


@pytest.mark.parametrize("position", range(4))
def test_every_token_counts(position):
    """S-13: changing any one token of a block changes its key."""
    changed = [*TOKENS[:4]]
    changed[position] += 1
    assert block_key(ROOT_KEY, changed) != block_key(ROOT_KEY, TOKENS[:4])


def test_order_of_tokens_counts():
    """S-13: a permuted block is another block."""
    assert block_key(ROOT_KEY, [1, 2]) != block_key(ROOT_KEY, [2, 1])


@pytest.mark.parametrize("changed", range(8))
def test_a_change_reaches_every_later_key(changed):
    """S-13: keys chain: equal before the changed block, different from it on."""
    other = [*TOKENS]
    other[changed] += 1
    equal = [a == b for a, b in zip(block_keys(TOKENS, 4), block_keys(other, 4), strict=True)]
    assert equal == [block < changed // 4 for block in range(3)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((), ("adapter",)),
        (("a",), ("b",)),
        (("a", "b"), ("b", "a")),
        (("ab",), ("a", "b")),
        (("",), ()),
        (("extra",), ("extra", "extra")),
    ],
)
def test_extra_keys_count(left, right):
    """S-13: adapter, salt and images are part of the key, each by itself and in order."""
    assert block_key(ROOT_KEY, TOKENS[:4], left) != block_key(ROOT_KEY, TOKENS[:4], right)


def test_a_key_is_reproducible():
    """S-13: equal requests share keys, in another process too."""
    root = hashlib.sha256(b"paged-mla prefix root").digest()
    parts = [root, *(bytes([token, *[0] * 7]) for token in (1, 2, 3, 4)), b"extra", b"lora"]
    encoded = b"".join(bytes([len(part), *[0] * 7]) + part for part in parts)
    assert block_key(ROOT_KEY, [1, 2, 3, 4], ["lora"]) == hashlib.sha256(encoded).digest()


@pytest.mark.parametrize(
    ("tokens", "hit"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_a_hit_leaves_one_token(tokens, hit):
    """S-13: of n tokens at most n - 1 are reused, in full blocks: of 8 tokens one block of 4."""
    found = _filled([*TOKENS, 7]).lookup([*TOKENS, 7][:tokens])
    assert found == [10, 11, 12][:hit]


@pytest.mark.parametrize("tokens", [[], [5], [5, 6]], ids=len)
def test_prompts_of_hardly_any_token(tokens):
    """S-13: blocks of one token, of a prompt with none, one and two: its last is computed."""
    index = PrefixIndex(1)
    for block_id, content in enumerate(block_contents(tokens, 1)):
        index.insert(content, block_id)
    assert index.lookup(tokens) == [0][: max(len(tokens) - 1, 0)]


def test_placeholders_count():
    """S-13: ids below 0, which represent images, are ordinary tokens."""
    keys = {block_key(ROOT_KEY, [token]) for token in (-2, -1, 0, 1)}
    assert len(keys) == 4


def test_a_hit_ends_at_the_first_unknown_block():
    """S-13: a known block behind an unknown one is not a prefix."""
    index = _filled(TOKENS)
    index.evict(block_contents(TOKENS, 4)[1])
    assert index.lookup([*TOKENS, 7]) == [10]


def test_other_extra_keys_miss():
    """S-13: the same tokens under another adapter share nothing."""
    assert _filled(TOKENS, ["a"]).lookup([*TOKENS, 7], ["b"]) == []
    assert _filled(TOKENS, ["a"]).lookup([*TOKENS, 7], ["a"]) == [10, 11, 12]


def test_the_first_block_of_a_key_stays():
    """S-13: a second block with the same contents is the first one."""
    index = _filled(TOKENS)
    assert index.insert(block_contents(TOKENS, 4)[0], 99) == 10


def test_a_collision_is_no_hit(monkeypatch):
    """S-13: one key for two contents is an error, wherever the key comes from."""
    index = _filled(TOKENS[:4])
    monkeypatch.setattr(BlockContent, "key", block_keys(TOKENS, 4)[0])
    with pytest.raises(RuntimeError, match="block 10 has another content with the same key"):
        index.lookup([1, 2, 3, 4, 5])


@settings(derandomize=True, deadline=None, max_examples=15)
@given(shared=st.integers(1, 12), own=st.integers(1, 6))
def test_hit_and_miss_give_the_same_output(shared, own):
    """S-13: a prompt computed whole, and on top of another request's blocks."""
    prefix, tail = request(shared, 1), request(own, 2)
    other = scene([prefix.followed_by(request(3, 3))], [0], placement=4)
    whole = prefix.followed_by(tail)
    miss = scene([whole], [0])
    expected = attend(miss.problem, miss.batch, miss.image, Rounding.EXACT)

    hit = (shared // 4) * 4
    table = np.full((1, 70), 99, np.int32)
    table[0, : hit // 4] = other.batch.block_table[0, : hit // 4]
    table[0, hit // 4 : 9] = 30 + np.arange(9 - hit // 4)
    computed = scene([whole], [hit])
    batch = replace(computed.batch, block_table=table)
    image = append(computed.problem, batch, other.image)
    answer = attend(computed.problem, batch, image, Rounding.EXACT)
    np.testing.assert_allclose(answer.out, expected.out[hit:], atol=1e-12)
    np.testing.assert_allclose(answer.lse, expected.lse[hit:], atol=1e-12)
