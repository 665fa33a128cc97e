"""Draws of steps: legal steps that are then changed in one to three ways."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from caches import NUM_BLOCKS
from hypothesis import strategies as st
from machine import SETUPS
from steps import Step
from values import Draw, above, below_zero, in_32_bits, wide_above, wide_below_zero

from paged_mla_optimized import MlaConfig

_LENGTHS: dict[str, tuple[str, ...]] = {
    "cu_seqlens_q": ("negative", "zero", "too large", "not monotone", "inconsistent"),
    "seq_lens": ("negative", "zero", "too large", "inconsistent"),
}
OF_STEPS = _LENGTHS | {"block_table": ("negative", "zero", "too large", "inconsistent")}
_PLAN = OF_STEPS | {
    "req_to_token": ("negative", "zero", "too large", "inconsistent"),
    "request_ids": ("negative", "zero", "too large", "inconsistent"),
    "mask": ("zero", "too large", "inconsistent"),
}
READS = {
    "plan": _PLAN,
    "append": _PLAN
    | {"slot_mapping": ("negative", "zero", "too large", "not monotone", "inconsistent")},
    "attend": _PLAN,
    "gather_context": _PLAN,
    "quantize_queries": _LENGTHS | {"scale": ("negative", "zero", "too large", "inconsistent")},
}
SPOILT = sorted({(value, kind) for of in READS.values() for value in of for kind in of[value]})

Fields = dict[str, Any]


def can_be(value: str, kind: str, config: MlaConfig) -> bool:
    """Return whether steps of a config have this value."""
    has_map = config.table_multiple > 0
    if value == "block_table":
        return not has_map
    if value in {"req_to_token", "request_ids"}:
        return has_map
    if value == "mask":
        return config.is_tree and (config.mask != "tree:packed" or kind == "too large")
    return True


@st.composite
def steps(draw: Draw, first: tuple[str, str]) -> Step:
    """Draw a step that is invalid in the `first` way and in up to two other ways."""
    names = [name for name, setup in SETUPS.items() if can_be(*first, setup.config)]
    name = draw(st.sampled_from(names))
    possible = [pair for pair in SPOILT if can_be(*pair, SETUPS[name].config)]
    more = draw(st.lists(st.sampled_from(possible), max_size=2))
    return spoil_fields(draw, legal(draw, name), [first, *more])


def spoil_fields(draw: Draw, fields: Fields, ways: Iterable[tuple[str, str]]) -> Step:
    """Change fields in some ways and return the step."""
    config = SETUPS[fields["config"]].config
    for value, kind in ways:
        _SPOILERS[value](draw, fields, config, kind)
    for name in ("cu_seqlens_q", "seq_lens"):  # two changes together may overflow
        fields[name] = [*map(in_32_bits, fields[name])]
    return Step(**_frozen(fields))


def _frozen(fields: Fields) -> Fields:
    frozen = {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}
    return frozen | {"table": tuple(map(tuple, fields["table"]))}


def legal(draw: Draw, name: str) -> Fields:
    """Draw the fields of a legal step."""
    config = SETUPS[name].config
    rows = draw(st.integers(1, config.max_rows))
    left = config.max_query_tokens
    most = min(config.max_draft_tokens, left) if config.is_tree else left
    starts, seq_lens = [0], []
    for _ in range(rows):
        seq_len = draw(st.integers(0, config.max_model_len))
        query_len = draw(st.integers(0, min(most, left)))
        if config.mask != "non_causal":
            query_len = min(query_len, seq_len)
        left -= query_len
        starts.append(starts[-1] + query_len)
        seq_lens.append(seq_len)
    tokens = starts[-1] + draw(st.integers(0, left))
    seed = draw(st.integers(0, 11))
    width = -(-config.max_model_len // config.block_size)
    order = random.Random(seed).sample(range(NUM_BLOCKS), min(NUM_BLOCKS, config.max_rows * width))
    blocks = itertools.cycle(order)  # rows share blocks if the cache is small
    fields: Fields = {
        "config": name,
        "cu_seqlens_q": starts,
        "seq_lens": seq_lens,
        "num_tokens": tokens,
        "lines": draw(st.integers(0, sum(seq_lens) + 2)),
        "seed": seed,
    }
    if config.table_multiple:
        lines, columns = rows + 1, draw(st.integers(max(seq_lens), config.max_model_len))
        fields["table"] = [
            [slot * config.block_size for slot in _some(blocks, -(-columns // config.block_size))]
            for _ in range(lines)
        ]
        fields["columns"] = columns
        fields["request_ids"] = draw(st.permutations(range(lines)))[:rows]
    else:
        columns = draw(st.integers(-(-max(seq_lens) // config.block_size), width))
        fields["table"] = [_some(blocks, columns) for _ in range(rows)]
    if config.mask == "tree:packed":
        fields["mask"] = draw(st.sampled_from([-(-config.max_draft_tokens // 8), 4]))
    elif config.is_tree:
        fields["mask"] = _elements(fields, config) + draw(st.integers(0, 3))
    if draw(st.integers(0, 3)) == 0:
        fields["slots"] = _named(draw, fields, config)
    if draw(st.integers(0, 3)) == 0:
        fields["max_query_len"] = draw(st.sampled_from([1, 2, 3, 2**31 - 1]))
    return fields


def _some(blocks: Iterator[int], count: int) -> list[int]:
    return [next(blocks) for _ in range(count)]


def _elements(fields: Fields, config: MlaConfig) -> int:
    """Return the number of elements of a flat mask that the rows need."""
    starts = fields["cu_seqlens_q"]
    query_lens = [end - begin for begin, end in itertools.pairwise(starts)]
    widths = query_lens if config.mask == "tree:qlen" else fields["seq_lens"]
    return sum(q * width for q, width in zip(query_lens, widths, strict=True))


def _named(draw: Draw, fields: Fields, config: MlaConfig) -> list[int]:
    slots = range(NUM_BLOCKS * config.block_size)
    rng = random.Random(draw(st.integers(0, 99)))
    return [rng.choice([-1, slot]) for slot in rng.sample(slots, fields["num_tokens"])]


def _spoil_starts(draw: Draw, fields: Fields, config: MlaConfig, kind: str) -> None:
    starts = fields["cu_seqlens_q"]
    at = draw(st.integers(0, len(starts) - 1))
    match kind:
        case "negative":
            starts[at] = draw(below_zero(config.block_size, fields["num_tokens"]))
        case "zero":
            starts[at] = 0
        case "too large":
            starts[at] = draw(above(fields["num_tokens"]))
        case "not monotone":
            starts[at] = max(starts) + 1
            starts.append(starts.pop(0) if draw(st.booleans()) else 0)
            starts[:] = starts[: len(fields["seq_lens"]) + 1]
        case "inconsistent":  # a row with more query tokens, and possibly too few keys
            more = draw(st.integers(1, config.max_query_tokens))
            starts[at:] = [start + more for start in starts[at:]]


def _spoil_lens(draw: Draw, fields: Fields, config: MlaConfig, kind: str) -> None:
    lens, starts = fields["seq_lens"], fields["cu_seqlens_q"]
    at = draw(st.integers(0, len(lens) - 1))
    match kind:
        case "negative":
            lens[at] = draw(below_zero(config.block_size, config.max_model_len))
        case "zero":
            lens[at] = 0
        case "too large":
            lens[at] = draw(above(config.max_model_len))
        case "inconsistent":
            if starts[at + 1] - starts[at] < 2:
                starts[at + 1 :] = [start + 2 for start in starts[at + 1 :]]
            lens[at] = draw(st.integers(1, max(min(starts[at + 1] - starts[at] - 1, 2**31 - 1), 1)))


def _spoil_table(draw: Draw, fields: Fields, config: MlaConfig, kind: str) -> None:
    table, size = fields["table"], config.block_size
    if kind == "inconsistent":
        width = draw(st.integers(0, max(len(table[0]) - 1, 0)))
        fields["table"] = [line[:width] for line in table]
        return
    lens = fields["seq_lens"]
    if not table[0]:
        table[:] = [[row] for row in range(len(table))]
    row = draw(st.integers(0, len(table) - 1))
    if lens[row] == 0:  # give the row a visible block
        lens[row] = 1
    used = max(min(-(-lens[row] // size), len(table[row])), 1)
    at = draw(st.sampled_from([0, used - 1, draw(st.integers(0, len(table[row]) - 1))]))
    number = {"negative": below_zero(), "zero": st.just(0), "too large": above(NUM_BLOCKS - 1)}
    table[row][at] = draw(number[kind])


def _spoil_map(draw: Draw, fields: Fields, config: MlaConfig, kind: str) -> None:
    table, size = fields["table"], config.block_size
    if kind == "inconsistent":  # a map with fewer columns than a row has keys
        fields["columns"] = draw(st.integers(0, max(min(max(fields["seq_lens"]), 2**20) - 1, 0)))
        fields["columns"] = min(fields["columns"], len(table[0]) * size)
        return
    known = [n for n in fields["request_ids"] if 0 <= n < len(table) and table[n]]
    if not known:
        return
    line = table[draw(st.sampled_from(known))]
    at = draw(st.integers(0, len(line) - 1))
    number = {
        "negative": below_zero(size),
        "zero": st.sampled_from([0, 1]),
        "too large": above(NUM_BLOCKS * size - 1),
    }
    line[at] = draw(number[kind])


def _spoil_ids(draw: Draw, fields: Fields, _config: MlaConfig, kind: str) -> None:
    ids = fields["request_ids"] = [*fields["request_ids"]]
    at = draw(st.integers(0, len(ids) - 1))
    match kind:
        case "negative":
            ids[at] = draw(below_zero())
        case "zero":
            ids[at] = 0
        case "too large":
            ids[at] = draw(above(len(fields["table"]) - 1))
        case "inconsistent":  # two rows of one request
            ids[at] = ids[draw(st.integers(0, len(ids) - 1))]


def _spoil_mask(draw: Draw, fields: Fields, config: MlaConfig, kind: str) -> None:
    starts = fields["cu_seqlens_q"]
    match kind:
        case "zero":
            fields["mask"] = 0
        case "too large":  # more nodes than the config allows
            at = draw(st.integers(1, len(starts) - 1))
            more = config.max_draft_tokens + draw(st.integers(0, 2))
            starts[at:] = [start + more for start in starts[at:]]
            fields["seq_lens"][at - 1] = config.max_model_len - draw(st.integers(0, 2))
        case "inconsistent":
            needed = min(max(_elements(fields, config), 1), 4096)
            fields["mask"] = needed - draw(st.integers(1, needed))


def _spoil_slots(draw: Draw, fields: Fields, config: MlaConfig, kind: str) -> None:
    slots = fields["slots"] = [*(fields.get("slots") or _named(draw, fields, config))]
    if not slots:
        return
    at = draw(st.integers(0, len(slots) - 1))
    match kind:
        case "negative":
            slots[at] = draw(wide_below_zero())
        case "zero":
            slots[at] = 0
        case "too large":
            slots[at] = draw(wide_above(NUM_BLOCKS * config.block_size))
        case "not monotone":
            slots.sort(reverse=True)
        case "inconsistent":  # two tokens in one slot
            slots[at] = slots[draw(st.integers(0, len(slots) - 1))]


def _spoil_scale(draw: Draw, fields: Fields, _config: MlaConfig, kind: str) -> None:
    scales = {
        "negative": [-1.0, -math.inf],
        "zero": [0.0, -0.0],
        "too large": [math.inf, 3e38],
        "inconsistent": [math.nan, 1e-38],
    }
    fields["scale"] = draw(st.sampled_from(scales[kind]))


_SPOILERS: dict[str, Callable[[Draw, Fields, MlaConfig, str], None]] = {
    "cu_seqlens_q": _spoil_starts,
    "seq_lens": _spoil_lens,
    "block_table": _spoil_table,
    "req_to_token": _spoil_map,
    "request_ids": _spoil_ids,
    "mask": _spoil_mask,
    "slot_mapping": _spoil_slots,
    "scale": _spoil_scale,
}


def wrong_in(step: Step) -> set[tuple[str, str]]:
    """Return the pairs of value and kind for which a step is at a limit or past it."""
    config, starts, lens = SETUPS[step.config].config, step.cu_seqlens_q, step.seq_lens
    size = config.block_size
    query_lens = [end - begin for begin, end in itertools.pairwise(starts)]
    columns = step.columns if step.request_ids is not None else len(step.table[0]) * size
    visible = [
        entry
        for line, seq_len in zip(step.table, lens, strict=False)
        for entry in line[: -(-max(seq_len, 0) // size)]
    ]
    pairs = list(zip(lens, query_lens, strict=True))
    found = {
        ("cu_seqlens_q", "negative"): min(starts) < 0,
        ("cu_seqlens_q", "zero"): 0 in starts[1:] or 0 in query_lens,
        ("cu_seqlens_q", "too large"): max(starts) > step.num_tokens,
        ("cu_seqlens_q", "not monotone"): min(query_lens) < 0,
        ("cu_seqlens_q", "inconsistent"): any(n < q for n, q in pairs) or starts[0] > 0,
        ("seq_lens", "negative"): min(lens) < 0,
        ("seq_lens", "zero"): 0 in lens,
        ("seq_lens", "too large"): max(lens) > config.max_model_len,
        ("seq_lens", "inconsistent"): any(0 < n < q for n, q in pairs) or max(lens) > columns,
    }
    if step.request_ids is None:
        found |= {
            ("block_table", "negative"): min(visible, default=0) < 0,
            ("block_table", "zero"): 0 in visible,
            ("block_table", "too large"): max(visible, default=0) >= NUM_BLOCKS,
            ("block_table", "inconsistent"): max(lens) > columns or columns == 0,
        }
    else:
        ids, slots = step.request_ids, [entry for line in step.table for entry in line]
        found |= {
            ("req_to_token", "negative"): min(slots, default=0) < 0,
            ("req_to_token", "zero"): 0 in slots,
            ("req_to_token", "too large"): max(slots, default=0) >= NUM_BLOCKS * size,
            ("req_to_token", "inconsistent"): max(lens) > columns,
            ("request_ids", "negative"): min(ids) < 0,
            ("request_ids", "zero"): 0 in ids,
            ("request_ids", "too large"): max(ids) >= len(step.table),
            ("request_ids", "inconsistent"): len(set(ids)) < len(ids),
        }
    if config.is_tree:
        found["mask", "too large"] = max(query_lens) > config.max_draft_tokens
        if config.mask != "tree:packed":
            widths = query_lens if config.mask == "tree:qlen" else lens
            elements = sum(q * n for q, n in zip(query_lens, widths, strict=True))
            found["mask", "zero"] = step.mask == 0
            found["mask", "inconsistent"] = step.mask < elements
    if step.slots is not None:
        slots = step.slots
        named = [slot for slot in slots if slot >= 0]
        found |= {
            ("slot_mapping", "negative"): min(slots, default=0) < -1,
            ("slot_mapping", "zero"): 0 in slots,
            ("slot_mapping", "too large"): max(slots, default=0) >= NUM_BLOCKS * size,
            ("slot_mapping", "not monotone"): list(slots) != sorted(slots),
            ("slot_mapping", "inconsistent"): len(set(named)) < len(named),
        }
    if step.scale is not None:
        found |= {
            ("scale", "negative"): step.scale < 0,
            ("scale", "zero"): step.scale == 0,
            ("scale", "too large"): step.scale > 1e38,
            ("scale", "inconsistent"): math.isnan(step.scale) or 0 < step.scale < 1e-37,
        }
    return {pair for pair, is_so in found.items() if is_so}
