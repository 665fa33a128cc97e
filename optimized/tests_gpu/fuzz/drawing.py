"""Random configurations and steps that one combination of family, format and mode serves.

A draw is a function of the combination, a seed and a number, so that it can be run again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from combinations import BATCH_INVARIANT, DIMS, EAGER, GRAPHED, PREFILL, Combination, dtypes_of

from paged_mla_optimized.backend import _config
from paged_mla_optimized.config.architectures import INTERPRETER
from paged_mla_optimized.operations.attend.hopper import hopper_box
from paged_mla_optimized.planning.choice import demand_of, step_query_len
from paged_mla_optimized.planning.families import FEW, FEW_FP8, PORTABLE, serving_variant
from paged_mla_shared.backend import mask_name
from paged_mla_shared.cases import Case, PrefillCase
from paged_mla_shared.cases.case import Row, SlotOrder, TableTail, Tree
from paged_mla_shared.dims import (
    DEEPSEEK_V3,
    GLM_4_7_FLASH,
    MISTRAL_SMALL_4,
    PRESETS,
    SMALL,
    MlaDims,
)
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

_EDGES = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
_FAR = 2000  # keys of a rare long row
_HEADS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 20, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128)
_BLOCK_SIZES = (64, 64, 64, 128, 256, 8, 16, 32, 1, 2, 3, 4, 5, 7, 12, 24, 48, 80, 96, 192)
_QUERY_LENS = (1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 17, 33)
_NODES = (1, 2, 3, 5, 8, 12, 33, 40)
_MOST_WORK = 150_000  # keys times pairs of token and head of one step: the oracle is slow
_MOST_TOKENS = 48
_ATTEMPTS = 5000
_SERVED = 0.6  # of a draw's steps, by the family that is wanted
_SHORT = 40  # keys of the longest row in the interpreter, which is slow


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One configuration and its steps, which all run on one runner.

    Parameters
    ----------
    combination : Combination
    number : int
    case : Case
    dims : MlaDims
    dtype : str
    settings : dict of str to value
        What the config has beyond the problem's, by name.
    runner : str
        "eager", "graphed", "mapped" or "portable".
    is_addressable : bool
        Whether a Gluon kernel can address the cache.
    """

    combination: Combination
    number: int
    case: Case
    dims: MlaDims
    dtype: str
    settings: dict[str, Any] = field(default_factory=dict)
    runner: str = EAGER
    is_addressable: bool = True

    def families(self, arch: str) -> list[str]:
        """Return the family that each step should get."""
        problem = self.case.problem(self.dims, self.dtype)
        config = _config(problem, self.settings)
        demand = demand_of(config, arch)
        found: list[str] = []
        for rows in self.case.steps:
            size = len(rows), sum(row.query_len for row in rows) + self.case.padded_tokens
            if self.runner == GRAPHED:  # it has two buckets, and a step takes a bucket's size
                whole = config.max_rows, config.max_query_tokens
                half = -(-whole[0] // 2), -(-whole[1] // 2)
                size = half if size[0] <= half[0] and size[1] <= half[1] else whole
            variant = serving_variant(demand, step_query_len(config, *size, None))
            served = self.is_addressable and self.runner != PORTABLE
            found.append(variant.family if served else PORTABLE)
        return found

    def labels(self) -> dict[str, str]:
        """Return what is special about the configuration, by subject."""
        case, problem = self.case, self.case.problem(self.dims, self.dtype)
        if isinstance(case, PrefillCase):
            return {
                "dtype": self.dtype,
                "heads": str(problem.dims.num_heads),
                "prefill": "causal" if case.causal else "whole rows",
            }
        rope = "none" if case.rope is None else str(case.rope.pairing)
        if case.rope is not None and case.rope.yarn is not None:
            rope += "+yarn"
        slots = f"named, {case.slot_order}" if case.explicit_slots else "planned"
        gaps = "padded" if case.token_padding or case.block_padding else "dense"
        box = hopper_box(case.block_size)
        return {
            "dtype": self.dtype,
            "heads": str(problem.dims.num_heads),
            "R+P": f"{self.dims.kv_lora_rank}+{self.dims.qk_rope_head_dim}",
            "block size": str(case.block_size),
            "TMA box": str(box) if box else "none",
            "mask": mask_name(problem),
            "rope": rope,
            "slots": slots,
            "table": "request map" if self.runner == "mapped" else "given",
            "cache": gaps if self.is_addressable else "not addressable",
            "inputs": "strided" if case.strided_inputs else "dense",
            "runner": self.runner,
        }


def draw(
    combination: Combination,
    *,
    seed: int,
    number: int,
    steps: int,
    arch: str,
    fewer_keys: bool = False,
) -> Draw:
    """Return draw `number` of a combination: most of its steps get the combination's family.

    Parameters
    ----------
    combination : Combination
    seed, number : int
    steps : int
        Steps of the draw.
    arch : str
        As ``planning/families.py`` names it.
    fewer_keys : bool
        Whether rows without a causal mask may have fewer keys than queries.
    """
    rng = random.Random(f"{seed} {combination} {number}")
    name = f"{combination}-{seed}-{number}"
    if combination.is_prefill:
        return _prefill(rng, combination, number, name, steps, arch)
    for _ in range(_ATTEMPTS):
        try:
            found = _draw(rng, combination, number, name, steps, arch, fewer_keys=fewer_keys)
            families = found.families(arch)
        except Unsupported:  # scales inside rows are at multiples of 4 bytes
            continue
        if families.count(combination.family) >= _SERVED * len(families):
            return found
    raise RuntimeError(f"{combination}: no such step in {_ATTEMPTS} attempts")


def _draw(
    rng: random.Random,
    combination: Combination,
    number: int,
    name: str,
    steps: int,
    arch: str,
    *,
    fewer_keys: bool,
) -> Draw:
    """Return a configuration and steps, whichever family serves them."""
    family, running = combination.family, combination.running
    interpreted = arch == INTERPRETER
    dtype = rng.choice(dtypes_of(combination.cache_format, arch))
    dims = DIMS[rng.choice([(32, 16)] if interpreted else list(DIMS))]
    heads = rng.randint(1, 6) if interpreted else _heads(rng)
    mask = rng.choice((Mask.CAUSAL, Mask.CAUSAL, Mask.NON_CAUSAL, Mask.TREE))
    is_decode = mask is not Mask.TREE and rng.random() < 0.5
    most = _MOST_TOKENS
    if family in {FEW, FEW_FP8} and not is_decode:
        heads = rng.choice((1, 2, 3, 4, 5, 8, 10))
        most = (16 if combination.products == "fast" else 32) // heads
    longest = _SHORT if interpreted else _FAR
    pads, mixes = rng.random() < 0.6, mask is not Mask.TREE and rng.random() < 0.4
    drawn = [
        _rows(
            rng,
            mask,
            heads,
            most,
            longest,
            is_decode=is_decode or (mixes and rng.random() < 0.3),
            pads=pads,
            fewer=fewer_keys,
        )
        for _ in range(steps)
    ]
    runner = running if running != BATCH_INVARIANT else EAGER
    if running != GRAPHED:
        others = ["mapped"] + ([PORTABLE] if family == PORTABLE else [])
        runner = rng.choice([EAGER, EAGER, *others])
    settings: dict[str, Any] = {"batch_invariant": True} if running == BATCH_INVARIANT else {}
    settings |= {"products": combination.products}
    settings |= {"table_multiple": rng.choice((1, 8))} if runner == "mapped" else {}
    case, is_addressable = _laid_out(
        rng, _case(rng, combination, name, mask, heads, drawn, is_decode), dims, family, dtype
    )
    if fewer_keys:
        case = replace(case, explicit_slots=False)
    return Draw(
        combination=combination,
        number=number,
        case=case,
        dims=dims,
        dtype=dtype,
        settings=settings,
        runner=runner,
        is_addressable=is_addressable,
    )


def _case(
    rng: random.Random,
    combination: Combination,
    name: str,
    mask: Mask,
    heads: int,
    steps: Sequence[tuple[Row, ...]],
    is_decode: bool,  # noqa: FBT001
) -> Case:
    """Return a case of these steps, random in all else but the cache's strides."""
    stored = FORMATS[combination.cache_format]
    multiple = stored.block_size_multiple
    block_size = rng.choice((*_BLOCK_SIZES, rng.randint(1, 256)))
    scale = rng.choice((None, None, None, 0.3, 10 ** rng.uniform(-3, 2)))
    # What is permuted would leave real tokens without a slot, and give it to padded ones.
    pads = any(row.query_len and not row.seq_len for rows in steps for row in rows)
    orders = (SlotOrder.TABLE,) if pads else (SlotOrder.TABLE, SlotOrder.PERMUTED)
    query_scale = rng.choice((1.0, 1.0, 8.0, 1e-3)) if scale is None else min(0.2 / scale, 100.0)
    return Case(
        group="fuzz",
        name=name,
        why="drawn for a family, a format and a mode",
        rules=("S-17", "S-19"),
        rows=steps[0],
        then=tuple(steps[1:]),
        num_heads=heads,
        cache_format=combination.cache_format,
        block_size=-(-block_size // multiple) * multiple,
        mask=mask,
        mask_spelling=rng.choice(list(MaskSpelling)),
        tree=rng.choice(list(Tree)),
        rope=_rope(rng),
        padded_tokens=0 if is_decode else rng.choice((0, 0, 3, 17)),
        query_scale=query_scale,
        softmax_scale=scale,
        table_tail=rng.choice(list(TableTail)),
        table_width=rng.choice((0, 3, 7)),
        packed_padding=rng.choice((0, 3)),
        spare=rng.choice((1, 1, 2, 4)),
        strided_inputs=rng.random() < 0.25,
        explicit_slots=rng.random() < 0.25,
        slot_order=rng.choice(orders),
        uneven=rng.random() < 0.15,
        coarse=rng.random() < 0.1,
        cache_scale=rng.choice((1.0, 0.0625, 0.37, 3.0)),
        powers_of_two=rng.random() < 0.2,
    )


def _laid_out(
    rng: random.Random, case: Case, dims: MlaDims, family: str, dtype: str
) -> tuple[Case, bool]:
    """Return a case with gaps in its cache, and whether a Gluon kernel can address that."""
    stored = FORMATS[case.cache_format or ""]
    width, itemsize = stored.row(dims)[1], numpy_dtype(stored.ckv_dtype).itemsize
    odd = family == PORTABLE and dtype != "float32" and rng.random() < 0.4
    if odd:  # rows on 4 or 8 bytes, or blocks no whole number of rows apart
        tokens, blocks = rng.choice(((4, 0), (0, 16), (4, 4)))
        return replace(case, token_padding=tokens, block_padding=blocks), False
    tokens = rng.choice((0, 0, 16, 32, 64)) // itemsize
    blocks = rng.choice((0, 0, 1, 3)) * (width + tokens)
    return replace(case, token_padding=tokens, block_padding=blocks), True


def _rows(
    rng: random.Random,
    mask: Mask,
    heads: int,
    most: int,
    longest: int,
    *,
    is_decode: bool,
    pads: bool,
    fewer: bool,
) -> tuple[Row, ...]:
    """Return a step's rows: at least one query, at most `most`, little work for the oracle.

    `pads` allows padded rows, `fewer` rows without a causal mask that have fewer keys than queries.
    """
    lens = (1,) if is_decode else _NODES if mask is Mask.TREE else _QUERY_LENS
    rows: list[Row] = []
    left, work = most, _MOST_WORK
    for index in range(rng.randint(1, 6 if is_decode else 4)):
        query_len = min(left, rng.choice(lens))
        kind = rng.random() if index else 1.0  # the first row is real, and has a query
        if pads and kind < 0.1:
            row = Row(0, min(query_len, 3))
        elif kind < 0.2:
            row = Row(_keys(rng, longest), 0)
        elif fewer and mask is Mask.NON_CAUSAL and query_len > 1 and rng.random() < 0.3:
            row = Row(rng.randint(1, query_len - 1), query_len)
        else:
            shares = rng.randrange(index) if index and rng.random() < 0.15 else None
            seq_len = min(_keys(rng, longest), work // (heads * query_len))
            row = Row(max(seq_len, query_len), query_len, shares)
        rows.append(row)
        left, work = left - row.query_len, work - row.seq_len * row.query_len * heads
        if left <= 0 or work <= 0:
            break
    return tuple(rows)


def _keys(rng: random.Random, longest: int) -> int:
    """Return a row's length: most are at the edges of tiles, few are long."""
    kind = rng.random()
    if kind < 0.03:
        found = rng.randint(_FAR // 2, _FAR)
    else:
        found = rng.randint(1, 500) if kind < 0.3 else rng.choice(_EDGES)
    return min(found, longest)


def _heads(rng: random.Random) -> int:
    return rng.choice(_HEADS) if rng.random() < 0.7 else rng.randint(1, 128)


def _rope(rng: random.Random) -> Rope | None:
    if rng.random() < 0.5:
        return None
    yarns = (None, None, Yarn(40.0, 4096), Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.707))
    return Rope(rng.choice(list(RopePairing)), rng.choice((1e4, 5e4, 1e6)), rng.choice(yarns))


def _prefill(
    rng: random.Random, combination: Combination, number: int, name: str, steps: int, arch: str
) -> Draw:
    """Return steps of materialized heads."""
    dtype = dtypes_of(combination.cache_format, arch)[0]
    interpreted = arch == INTERPRETER
    dims, runner = DEEPSEEK_V3, EAGER
    if interpreted:
        dims = SMALL
    elif combination.family != PREFILL:
        dims = rng.choice((DEEPSEEK_V3, MISTRAL_SMALL_4, GLM_4_7_FLASH, PRESETS["small"]))
        runner = PORTABLE
    heads = rng.choice((1, 2, 3) if interpreted else (1, 2, 3, 4, 5, 8, 16, 20))
    drawn = [_prompts(rng, heads, _SHORT if interpreted else _FAR) for _ in range(steps)]
    case = PrefillCase(
        group="fuzz",
        name=name,
        why="drawn for a family, a format and a mode",
        rules=("S-17", "S-21"),
        rows=drawn[0],
        then=tuple(drawn[1:]),
        num_heads=heads,
        causal=rng.random() < 0.5,
        padded_tokens=rng.choice((0, 0, 3, 70)),
        query_scale=rng.choice((1.0, 1.0, 8.0, 1e-3)),
        softmax_scale=rng.choice((None, None, 0.3)),
        spare=rng.choice((1, 1, 2)),
        strided_inputs=rng.random() < 0.4,
    )
    return Draw(
        combination=combination, number=number, case=case, dims=dims, dtype=dtype, runner=runner
    )


def _prompts(rng: random.Random, heads: int, longest: int) -> tuple[Row, ...]:
    """Return rows of keys and queries of any length; some have more queries than keys."""
    rows: list[Row] = []
    work = _MOST_WORK
    for _ in range(rng.randint(1, 5)):
        queries = min(rng.choice((1, 3, 17, 63, 64, 65, 127, 128, 129, 140)), longest)
        keys = min(_keys(rng, longest) + rng.choice((0, queries)), longest)
        if queries * keys * heads > work:
            queries = max(work // (heads * max(keys, 1)), 1)
        rows.append(Row(keys, queries if rng.random() < 0.9 else 0))
        work -= queries * keys * heads
        if work <= 0:
            break
    return tuple(rows)
