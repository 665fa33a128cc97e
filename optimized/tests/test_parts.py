"""Which keys each part of a step has, and how parts are merged."""

import numpy as np
import pytest
import torch
from prefill_step import V, build, config, prefix_sums

from paged_mla_optimized import Prefill
from paged_mla_optimized.operations.merge.tiles import MergeTiles
from paged_mla_optimized.operations.prefill.key_chunks import KeyChunk


def spans(part: KeyChunk) -> list[range]:
    """Return each row's keys in a part."""
    lens = part.key_starts.diff().tolist()
    return [
        range(first, first + n) for first, n in zip(part.first_tokens.tolist(), lens, strict=True)
    ]


@pytest.mark.parametrize("room", [64, 70, 100, 1000])
def test_every_key_once(room):
    """S-21: own keys first, then contexts, full parts but the last; rows without queries never."""
    rows = [(33, 1), (200, 3), (0, 2), (40, 40), (90, 0), (100, 7)]
    keys, queries = zip(*rows, strict=True)
    part = KeyChunk(8, room, torch.device("cpu"))
    cu_seqlens_q = prefix_sums([5, *queries])[1:]
    found: list[list[int]] = [[] for _ in rows]
    total = sum(n for n, q in rows if q)
    parts = -(-total // room)
    for number in range(parts + 1):
        lines = min(max(total - number * room, 0), room)
        part.fill(cu_seqlens_q, torch.tensor(keys, dtype=torch.int32), number, lines)
        mine = spans(part)
        assert part.query_starts.tolist() == prefix_sums(list(queries)).tolist()
        assert sum(map(len, mine)) == lines
        for row, span in enumerate(mine):
            found[row] = [*span, *found[row]]
        if number == 0:
            ends = [span.stop for span, q in zip(mine, queries, strict=True) if q]
            assert ends == [n for n, q in rows if q]
            assert all(len(span) >= min(q, n) for span, (n, q) in zip(mine, rows, strict=True))
    assert found == [list(range(n)) if q else [] for n, q in rows]


def test_many_long_rows():
    """S-21: more keys than int32 counts."""
    part = KeyChunk(4, 1 << 20, torch.device("cpu"))
    keys = torch.tensor([2**31 - 1] * 3, dtype=torch.int32)
    last = -(-3 * (2**31 - 1) // (1 << 20)) - 1
    part.fill(prefix_sums([4, 4, 4]), keys, last, 1 << 20)
    assert spans(part)[2] == range(3 * (2**31 - 1) - last * (1 << 20))
    assert part.key_starts[2] == 0


def test_rows_without_keys_are_left_alone():
    """S-8: no tile, so that neither attention nor merge touches them, nor padding."""
    step = build((0, 5), (70, 40), (0, 3), padded_tokens=2, causal=False, writes_empty=False)
    out, lse = step.attend()
    expected = build((70, 40), causal=False)
    expected.q_nope, expected.q_pe = step.q_nope[5:45], step.q_pe[5:45]
    expected.k_nope, expected.k_pe, expected.v = step.tensors[2:]
    for mine, right in zip((out, lse), expected.attend(), strict=True):
        assert torch.equal(mine[5:45], right)
        assert mine[:5].isnan().all()
        assert mine[45:].isnan().all()


def test_no_row_has_keys():
    """S-8: a part that the host expected and the device does not have."""
    step = build((0, 5), (0, 40), causal=False, writes_empty=False)
    out, lse = step.attend()
    assert out.isnan().all()
    assert lse.isnan().all()


def test_many_chunks_round_once():
    """S-8, S-21: forty merges are as near to the exact mean as a single one; NaN has no weight."""
    chunks, tokens, heads, dtype = 40, 12, 2, torch.float16
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(chunks, tokens, heads, V, generator=generator).to(dtype)
    lses = torch.randn(chunks, tokens, heads, generator=generator)
    lses[3, :, 1] = -torch.inf
    outs[3, :, 1] = torch.nan
    lses[:, 5] = -torch.inf
    prefill = Prefill(config(dtype=dtype, causal=False, writes_empty=False), "cpu")
    prefill.plan(prefix_sums([tokens]), prefix_sums([1]), num_tokens=tokens)
    out, lse = outs[0].clone(), lses[0].clone()
    rest, merge = torch.zeros_like(out), MergeTiles(prefill.tiles.tile_m, prefill.config)
    for chunk in zip(outs[1:], lses[1:], strict=True):
        merge.launch(prefill.tiles, (out, lse), rest, chunk)
    weights = lses.double().softmax(0).nan_to_num(0.0)[..., None]
    exact = (weights * outs.double().nan_to_num(0.0)).sum(0)
    ulp = torch.finfo(dtype).eps
    np.testing.assert_allclose(out.double(), exact, rtol=ulp, atol=ulp / 8)
    np.testing.assert_allclose(lse.double(), lses.double().logsumexp(0), rtol=1e-6)


def test_merged_where_there_are_tiles():
    """S-8: rows without keys in the chunk keep every bit, and what is rounded away."""
    prefill = Prefill(config(causal=False, writes_empty=False), "cpu")
    prefill.plan(prefix_sums([4, 6, 3]), prefix_sums([0, 9, 0]), num_tokens=20)
    out, lse = torch.full((20, 2, V), 3.0), torch.zeros(20, 2)
    rest = torch.zeros_like(out)
    chunk = torch.full((20, 2, V), 5.0), torch.zeros(20, 2)
    merge = MergeTiles(prefill.tiles.tile_m, prefill.config)
    merge.launch(prefill.tiles, (out, lse), rest, chunk)
    merged = torch.zeros(20, dtype=torch.bool)
    merged[4:10] = True
    assert (out[merged] == 4).all()
    assert (out[~merged] == 3).all()
    assert (lse[~merged] == 0).all()
