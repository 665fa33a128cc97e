"""Explain for people how a step runs and why; functions may wait for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.planning.families import (
    AttendVariant,
    Demand,
    fixed_splits,
    passed_over,
    row_share,
)


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One tensor that an instance has on its device."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name:16} {self.nbytes:>12,} bytes  {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How one step runs.

    Parameters
    ----------
    kernel, why : str
        The kernel, and the properties of the step that decide for it.
    passed_over : dict of str to str
        Faster kernels that do not fit the step, with the reason for each.
    programs : int
        Programs of the attend launch; the same for every step.
    tile_m, tile_n, lanes : int
        See :class:`~paged_mla_optimized.planning.families.AttendVariant`.
    units : int
        The work: key tiles of all groups of query tiles, plus the cost of starting each group or,
        with ``batch_invariant``, each split of a group.
    part_units : int
        Units that one part of the grid works on; the last parts may have fewer or none.
    idle_parts : int
        Parts without a key tile, even if they have units for the start of a group.
    groups, cut_groups : int
        Groups of query tiles, and the number of groups that several parts share, so that combine
        merges their partial results.
    cut : str
        How work is divided into parts.
    """

    kernel: str
    why: str
    passed_over: dict[str, str]
    programs: int
    tile_m: int
    tile_n: int
    lanes: int
    units: int
    part_units: int
    idle_parts: int
    groups: int
    cut_groups: int
    cut: str

    def __str__(self) -> str:
        tiles = f"{self.tile_m} (token, head) pairs x {self.tile_n} keys; lanes: {self.lanes}"
        work = f"{self.units} units (key tiles and starts) in {self.groups} groups"
        lines = (
            f"kernel  {self.kernel}: {self.why}",
            *(f"not     {name}: {reason}" for name, reason in self.passed_over.items()),
            f"tiles   {tiles}",
            f"grid    {self.programs} programs; {self.idle_parts} parts are idle",
            f"work    {work}, {self.part_units} for each part",
            f"splits  {self.cut}; combine merges {self.cut_groups} groups",
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class LayerExplanation:
    """How one step runs between a layer's projections.

    Parameters
    ----------
    attention : Explanation or None
        The explanation for the absorbed rows; ``None`` if there are none.
    absorbed_rows, materialized_rows : int
        Number of leading rows that are absorbed, and of the other rows, which are materialized.
    materialized_keys, parts : int
        Upper bound of the keys that are materialized, and the number of key chunks.
    """

    attention: Explanation | None
    absorbed_rows: int
    materialized_rows: int = 0
    materialized_keys: int = 0
    parts: int = 0

    def __str__(self) -> str:
        rows = f"rows    {self.absorbed_rows} absorbed, {self.materialized_rows} materialized"
        if self.materialized_rows:
            rows += f", {self.materialized_keys} keys in {self.parts} parts"
        return rows if self.attention is None else f"{rows}\n{self.attention}"


def buffers_of(tensors: Mapping[str, torch.Tensor]) -> list[Buffer]:
    """Return buffers of named tensors, largest first."""
    buffers = [
        Buffer(name=name, shape=tuple(t.shape), dtype=t.dtype, nbytes=t.nbytes)
        for name, t in tensors.items()
    ]
    return sorted(buffers, key=lambda buffer: -buffer.nbytes)


def explain(
    config: MlaConfig,
    variant: AttendVariant,
    *,
    num_sms: int,
    demand: Demand,
    query_len: int,
    starts: list[int],
    seq_lens: list[int],
    num_tokens: int,
) -> Explanation:
    """Compute on the host the schedule that ``kernels/common/plan.py`` computes on the device."""
    programs = variant.programs(num_sms)
    rows = [
        (tokens * config.num_heads, -(-keys // variant.tile_n))
        for tokens, keys in _working_rows(config, starts, seq_lens, num_tokens)
    ]
    lanes = _choose_lanes(rows, variant)
    shapes = [(-(-pairs // (variant.tile_m * lanes)), tiles) for pairs, tiles in rows]
    parts = programs // lanes
    if config.batch_invariant:
        splits = [_fixed_splits(config, variant, pairs, tiles) for pairs, tiles in rows]
        begun = sum(n * count for (n, _), count in zip(shapes, splits, strict=True))
        part_units, overhead, is_even = _choose_length(shapes, begun, parts, variant)
        pieces = [(n, tiles, -(-tiles // n)) for (_, tiles), n in zip(shapes, splits, strict=True)]
        longest = max((length for _, _, length in pieces), default=0)
        units = sum(groups * tiles for groups, tiles in shapes)
        padding = 0
        if is_even:
            lacking = max(n * length - tiles for n, tiles, length in pieces)
            padding = lacking if part_units < longest else overhead
            overhead = 0
            units += padding * sum(groups for groups, _ in shapes)
        else:
            units += overhead * begun
        part_units = max(part_units, longest)
        lengths = [length for _, _, length in pieces]
        busy = _busy_parts(shapes, lengths, part_units, overhead, padding)
        cut_groups = sum(n for (n, _), count in zip(shapes, splits, strict=True) if count > 1)
        cut = f"rows by their own lengths, up to {max(splits, default=0)} splits (batch-invariant)"
    else:
        begun = sum(groups for groups, _ in shapes)
        part_units, overhead, _ = _choose_length(shapes, begun, parts, variant)
        units = sum(groups * (tiles + overhead) for groups, tiles in shapes)
        cut_groups = _cut_by_parts(shapes, part_units, overhead)
        busy = _busy_parts(shapes, [tiles for _, tiles in shapes], part_units, overhead, 0)
        cut = "equal parts of the units"
    queries = f"{config.num_heads} heads x {query_len} queries"
    return Explanation(
        kernel=f"{variant.family} attend on {demand.arch}",
        why=f"{queries}, {config.dtype}, mask {config.mask}",
        passed_over=passed_over(demand, query_len),
        programs=programs,
        tile_m=variant.tile_m,
        tile_n=variant.tile_n,
        lanes=lanes,
        units=units,
        part_units=part_units,
        idle_parts=parts - busy,
        groups=sum(groups for groups, _ in shapes),
        cut_groups=cut_groups,
        cut=cut,
    )


def _working_rows(
    config: MlaConfig, starts: list[int], seq_lens: list[int], num_tokens: int
) -> Iterator[tuple[int, int]]:
    """Yield tokens and keys of the rows that the plan does not treat as padding (S-2, S-9)."""
    first = 0
    for (start, end), seq_len in zip(pairwise(starts), seq_lens, strict=True):
        within = min(max(start, 0), num_tokens)
        first = max(first, within)
        tokens = max(first, min(end, num_tokens)) - first
        keys = seq_len - (end - start - tokens)  # tokens past num_tokens have no key
        is_legal = 0 <= start <= end and first == within and seq_len <= config.max_model_len
        is_legal &= config.mask == "non_causal" or seq_len >= end - start
        is_legal &= not config.is_tree or end - start <= config.max_draft_tokens
        if is_legal and min(tokens, seq_len, keys) > 0:
            yield tokens, keys


def _fixed_splits(config: MlaConfig, variant: AttendVariant, pairs: int, key_tiles: int) -> int:
    """Return the splits of each query tile of a row, as in ``kernels/common/plan.py``."""
    query_tiles = max(-(-pairs // variant.tile_m), 1)
    longest = variant.split_tiles * (2 if query_tiles >= 4 else 1)
    length = -(-key_tiles // max(row_share(config.max_rows) // query_tiles, 1))
    length = min(max(length, variant.min_units), longest)
    most = fixed_splits(variant, config.max_rows, config.kv_lora_rank) // query_tiles
    length = -(-key_tiles // min(-(-key_tiles // length), max(most, 1)))
    return -(-key_tiles // length)


def _choose_lanes(rows: list[tuple[int, int]], variant: AttendVariant) -> int:
    """Return the largest number of lanes that leaves few lanes without a query tile."""

    def spent(lanes: int) -> int:
        return lanes * sum(-(-pairs // (variant.tile_m * lanes)) * tiles for pairs, tiles in rows)

    options = (1 << step for step in range(variant.lane_steps + 1))
    return max(lanes for lanes in options if spent(lanes) * 16 <= spent(1) * 17)


def _choose_length(
    shapes: list[tuple[int, int]], starts: int, parts: int, variant: AttendVariant
) -> tuple[int, int, bool]:
    """Return units of a part, overhead, and whether the division is even, as in ``plan.py``."""
    total = sum(groups * tiles for groups, tiles in shapes)
    count = sum(groups for groups, _ in shapes)
    share = max(-(-total // parts), variant.min_units)
    lengths = {tiles for groups, tiles in shapes if groups > 0}
    if len(lengths) == 1:
        row = lengths.pop()
        pieces = max(min(parts // count, row // variant.min_units), 1)
        piece = -(-row // pieces)
        fitted = -(-count // parts) * row if count > parts else piece
        if (fitted - share) * 32 <= share * variant.slack:
            return fitted, 0 if count > parts else -row % piece, True
    equal = -(-(total + variant.overhead * starts) // parts)
    return max(equal, variant.min_units), variant.overhead, False


def _busy_parts(
    shapes: list[tuple[int, int]], lengths: list[int], part_units: int, overhead: int, padding: int
) -> int:
    """Return the number of parts with a key tile; each split starts with `overhead` units."""
    busy: set[int] = set()
    unit = 0
    for (groups, row), length in zip(shapes, lengths, strict=True):
        for _ in range(groups):
            for begin in range(0, row, length):
                unit += overhead
                end = unit + min(length, row - begin)
                busy.update(range(unit // part_units, (end - 1) // part_units + 1))
                unit = end
            unit += padding
    return len(busy)


def _cut_by_parts(shapes: list[tuple[int, int]], part_units: int, overhead: int) -> int:
    """Return the number of groups that several parts share."""
    begin, cut_groups = 0, 0
    for groups, tiles in shapes:
        for _ in range(groups):
            begin += overhead
            cut_groups += begin // part_units != (begin + tiles - 1) // part_units
            begin += tiles
    return cut_groups
