"""Which form a row of a layer takes."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from paged_mla_optimized import LayerConfig, MlaConfig
from paged_mla_optimized.planning.layer_cost import RATES, Forms, Prices


def layer(num_heads=16, dims=(128, 128)):
    attention = MlaConfig(
        num_heads=num_heads,
        softmax_scale=1.0,
        block_size=64,
        max_rows=256,
        max_query_tokens=8192,
        max_model_len=1 << 17,
    )
    nope, value = dims
    return LayerConfig(attention=attention, qk_nope_head_dim=nope, v_head_dim=value)


def lens_of(rows):
    """Return lengths of queries and keys of rows of (query, context)."""
    queries, contexts = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return queries, queries + contexts


def forms_of(config, rows):
    """Return what rows of (query, context) take."""
    return Forms(Prices.of(config), *lens_of(rows))


def choose(*rows, num_heads=16, dims=(128, 128)):
    """Return how many leading rows of (query, context) are absorbed."""
    return forms_of(layer(num_heads, dims), rows).absorbed_rows()


@pytest.mark.parametrize("num_heads", [16, 128])
def test_decode_is_absorbed_and_prompts_are_not(num_heads):
    """S-21: the ends of the table, at any context."""
    for context in (1000, 32000, 128000):
        assert choose((1, context), num_heads=num_heads) == 1
        assert choose((8, context), num_heads=num_heads) == 1
        assert choose((1024, context), num_heads=num_heads) == 0
    assert choose((2048, 0), num_heads=num_heads) == 0


@pytest.mark.parametrize("num_heads", [1, 2, 8, 64])
@pytest.mark.parametrize("dims", [(128, 128), (192, 256)], ids=["deepseek", "glm"])
def test_decode_and_verify_are_absorbed(num_heads, dims):
    """S-21: one to four queries, few heads on a rank, GLM's head sizes too; any number of rows."""
    for queries, context in ((1, 300), *itertools.product((1, 2, 4), (1000, 128000))):
        for rows in (1, 200):
            decode = [(queries, context)] * rows
            assert choose(*decode, num_heads=num_heads, dims=dims) == rows


def test_a_gather_counts():
    """S-21: of one head's keys and values it is most bytes; queries up to 200 are absorbed."""
    assert choose((200, 128000), num_heads=1) == 1


def test_short_queries_behind_long_contexts():
    """S-21: a hit of 32k tokens is not projected again for 64 new ones, but for 512."""
    assert choose((64, 32768), num_heads=128) == 1
    assert choose((512, 32768), num_heads=128) == 0


def test_mixed_steps_are_cut_between_rows():
    """S-21: leading decode rows are absorbed, prompts behind them materialized."""
    decode = [(1, 5000)] * 30
    assert choose(*decode, (2048, 0), (4096, 8192)) == 30
    assert choose(*decode) == 30


def test_rows_in_another_order():
    """S-21: behind a prompt, decode rows take its form, or it takes theirs; that costs time."""
    decode, prompt = [(1, 5000)] * 30, (2048, 0)
    assert choose(prompt, *decode) in {0, 31}
    best, worst = [*decode, prompt], [prompt, *decode]
    assert forms_of(layer(), best).slowdown(30) == pytest.approx(1)
    assert forms_of(layer(), worst).slowdown(choose(*worst)) > 1.25
    assert forms_of(layer(), best).slowdown(0) > 1.25


def test_rows_without_queries_decide_nothing():
    """S-2: they cost nothing either way, and no rows are absorbed too."""
    assert choose((1, 5000), (0, 900), (0, 0)) == 3
    assert choose() == 0


def seconds(config, rows, is_absorbed):
    """Return the time of a step as the page of layers counts it, row after row."""
    mla, heads = config.attention, config.attention.num_heads
    rank, rope = mla.kv_lora_rank, mla.qk_rope_head_dim
    token = (rank + rope) * mla.dtype.itemsize
    widths = config.qk_nope_head_dim + config.v_head_dim
    pair, moved = 2 * heads * (widths + rope), heads * widths * mla.dtype.itemsize / RATES.memory
    absorbed = made = attended = tile = 0.0
    longest = 0
    for (queries, context), alone in zip(rows, is_absorbed, strict=True):
        if queries == 0:
            continue
        keys = queries + context
        seen = keys - (queries - 1) / 2
        products = 2 * heads * rank * widths / RATES.projection
        if alone:
            attention = 2 * heads * (2 * rank + rope) * queries * seen / RATES.absorbed
            absorbed += max(attention, keys * token / RATES.memory) + products * queries
            longest = max(longest, queries)
        else:
            made += keys * (2 * token / RATES.memory + max(products, moved))
            padded = -(-queries // 128) * 128
            attended += max(pair * padded * seen / RATES.materialized, keys * moved)
            tile = max(tile, keys * 128 * pair / heads / RATES.tile)
    if absorbed:
        absorbed += RATES.absorbed_start + (longest > 1) * RATES.several_start
    if made:
        made += RATES.materialized_start
    return absorbed + made + max(attended, tile)


def some_rows(generator):
    """Return rows of decode, verification, chunks and prompts, in order or in none."""
    kinds = generator.choice(["idle", "decode", "verify", "chunk", "any"], generator.integers(40))
    longest = {"idle": 0, "decode": 1, "verify": 8, "chunk": 2048, "any": 8192}
    rows = [
        (
            int(generator.integers(min(1, longest[kind]), longest[kind] + 1)),
            int(2 ** generator.uniform(0, 17)) - 1,
        )
        for kind in kinds
    ]
    return rows if generator.random() < 0.3 else sorted(rows)


@pytest.mark.parametrize("num_heads", [2, 16, 128])
@pytest.mark.parametrize("dims", [(128, 128), (192, 256)], ids=["deepseek", "glm"])
def test_the_whole_step_takes_least_time(num_heads, dims):
    """S-21: of all cuts, the one with fewest materialized rows where several take as long."""
    config, generator = layer(num_heads, dims), np.random.default_rng(num_heads)
    for _ in range(60):
        rows = some_rows(generator)
        count = len(rows)
        times = [seconds(config, rows, np.arange(count) < cut) for cut in range(count + 1)]
        least = min(times) * (1 + 1e-9)
        last = max(cut for cut in range(count + 1) if times[cut] <= least)
        assert forms_of(config, rows).absorbed_rows() == last


@pytest.mark.parametrize("num_heads", [2, 16, 128])
def test_what_an_order_costs(num_heads):
    """S-21: compared with each row in the form that is better for it alone."""
    config, generator = layer(num_heads), np.random.default_rng(num_heads)
    for _ in range(60):
        rows = some_rows(generator)
        cut = int(generator.integers(len(rows) + 1))
        found = forms_of(config, rows).slowdown(cut)
        starts = RATES.absorbed_start, RATES.several_start, RATES.materialized_start
        better = [
            seconds(config, [row], [True]) - (row[0] > 0) * starts[0] - (row[0] > 1) * starts[1]
            <= seconds(config, [row], [False]) - (row[0] > 0) * starts[2] + 1e-18
            for row in rows
        ]
        least = seconds(config, rows, better)
        expected = seconds(config, rows, np.arange(len(rows)) < cut) / least if least else 1.0
        assert found == pytest.approx(expected, rel=1e-9)


def test_the_default_workspace():
    """1 GiB of keys and values: 131072 of 16 heads, 16384 of 128; never below a step's tokens.

    Nor above what all rows may have.
    """
    rooms = {}
    for num_heads, tokens, longest in (
        (16, 8192, 1 << 17),
        (128, 8192, 1 << 17),
        (128, 32768, 1 << 17),
        (16, 1024, 50),
        (16, 32768, 50),
    ):
        attention = MlaConfig(
            num_heads=num_heads,
            softmax_scale=1.0,
            block_size=64,
            max_rows=256,
            max_query_tokens=tokens,
            max_model_len=longest,
        )
        rooms[num_heads, tokens] = LayerConfig(attention=attention).room
    assert rooms == {
        (16, 8192): 131072,
        (128, 8192): 16384,
        (128, 32768): 32768,
        (16, 1024): 256 * 50,
        (16, 32768): 32768,
    }


MEASURED = json.loads((Path(__file__).parents[1] / "bench" / "reports" / "layer.json").read_text())
CROSSOVER = [row for row in MEASURED["rows"] if "absorbed" in row["us"]]


@pytest.mark.parametrize("num_heads", [16, 128])
def test_no_measured_step_is_a_tenth_slower_than_its_better_form(num_heads):
    """S-21: one row of 1 to 2048 queries behind contexts to 128k, as an H200 took them."""
    of_heads = [row for row in CROSSOVER if row["step"].startswith(f"h{num_heads} ")]
    assert len(of_heads) == 72
    for row in of_heads:
        queries, context = map(int, re.findall(r"[qc](\d+)", row["step"]))
        absorbed = choose((queries, 1024 * context), num_heads=num_heads)
        chosen = row["us"]["absorbed" if absorbed else "materialized"]
        assert chosen <= 1.1 * min(row["us"].values()), row["step"]
