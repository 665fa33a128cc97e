"""Draws for ``DraftSteps``, ``ExtendWindow`` and ``merge_partials``."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from caches import NUM_BLOCKS, new_cache
from hypothesis import strategies as st
from machine import DEVICE, FILLINGS, SETUPS, as_bits, new_guards, watched
from values import HIGHEST, Draw, above, below_zero

from paged_mla_optimized import DraftSteps, ExtendWindow, merge_partials

I32 = torch.int32
_IDS = ("negative", "zero", "too large", "inconsistent")
READS = {
    "fill": {"prefix_lens": _IDS[:3]},
    "copy_tails": {"prefix_lens": _IDS[:3], "prefix_table": _IDS, "branch_blocks": _IDS},
}
READS_OF_WINDOW = {"fill": {"committed": ("negative", "zero", "too large")}}
READS_OF_MERGE = {"merge_partials": {"lses": _IDS, "outs": ("zero", "too large", "inconsistent")}}
_STEPS = 3


@dataclass(frozen=True)
class Draft:
    """The prefixes of B requests and the blocks of their branches.

    Parameters
    ----------
    config : str
        The key in ``SETUPS`` of the cache's config.
    prefix_lens : tuple of int [B]
    prefix_table : tuple of tuple of int [B, M]
    branch_blocks : tuple of tuple of tuple of int [B, k, W]
    seed : int
    """

    config: str
    prefix_lens: tuple[int, ...]
    prefix_table: tuple[tuple[int, ...], ...]
    branch_blocks: tuple[tuple[tuple[int, ...], ...], ...]
    seed: int = 0


@st.composite
def drafts(draw: Draw, first: tuple[str, str]) -> Draft:
    """Draw prefixes that are invalid in the `first` way and possibly in other ways."""
    name = draw(st.sampled_from([*SETUPS]))
    size = SETUPS[name].config.block_size
    requests, branches = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    width, own = draw(st.integers(0, 3)), -(-(size - 1 + _STEPS) // size) + draw(st.integers(0, 1))
    order = iter(random.Random(draw(st.integers(0, 9))).sample(range(NUM_BLOCKS), NUM_BLOCKS))
    lens = [draw(st.integers(0, width * size)) for _ in range(requests)]
    table = [[next(order) for _ in range(width)] for _ in lens]
    blocks = [[[next(order, 0) for _ in range(own)] for _ in range(branches)] for _ in lens]
    ways = [(value, kind) for value, kinds in READS["copy_tails"].items() for kind in kinds]
    for value, kind in [first, *draw(st.lists(st.sampled_from(ways), max_size=2))]:
        row = draw(st.integers(0, requests - 1))
        if value == "prefix_lens":
            numbers = {
                "negative": below_zero(size),
                "zero": st.just(0),
                "too large": above(width * size),
            }
            lens[row] = draw(numbers[kind])
            continue
        if not 0 < lens[row] <= width * size or lens[row] % size == 0:  # a request with a tail
            lens[row] = max(min(width * size, size) - 1, 0)
        line = table[row] if value == "prefix_table" else blocks[row][0]
        if line:
            at = lens[row] // size if value == "prefix_table" else 0
            ids = {
                "negative": below_zero(),
                "zero": st.just(0),
                "too large": above(NUM_BLOCKS - 1),
                "inconsistent": st.just(table[0][0] if table[0] else blocks[-1][-1][0]),
            }
            line[at] = draw(ids[kind])
    frozen = tuple(tuple(map(tuple, request)) for request in blocks)
    return Draft(name, tuple(lens), tuple(map(tuple, table)), frozen, draw(st.integers(0, 9)))


def wrong_in_draft(draft: Draft) -> set[tuple[str, str]]:
    """Return pairs of value and kind."""
    size, width = SETUPS[draft.config].config.block_size, len(draft.prefix_table[0])
    lens = draft.prefix_lens
    tails, targets = [], []
    for request, length in enumerate(lens):
        if 0 < length <= width * size and length % size:
            tails.append(draft.prefix_table[request][length // size])
            targets += [branch[0] for branch in draft.branch_blocks[request]]
    found = {
        ("prefix_lens", "negative"): min(lens) < 0,
        ("prefix_lens", "zero"): 0 in lens,
        ("prefix_lens", "too large"): max(lens) > width * size,
    }
    for value, ids in (("prefix_table", tails), ("branch_blocks", targets)):
        found |= {
            (value, "negative"): min(ids, default=0) < 0,
            (value, "zero"): 0 in ids,
            (value, "too large"): max(ids, default=0) >= NUM_BLOCKS,
            (value, "inconsistent"): len({*tails, *targets}) < len(tails) + len(targets),
        }
    return {pair for pair, is_so in found.items() if is_so}


def hold_draft(draft: Draft) -> None:
    """Check that padded requests change no memory, and other requests only their own."""
    config = SETUPS[draft.config].config
    size, lens = config.block_size, draft.prefix_lens
    width, own_width = len(draft.prefix_table[0]), len(draft.branch_blocks[0][0])
    branches = len(draft.branch_blocks[0])
    is_live = [length > 0 and -(-length // size) <= width for length in lens]
    for filling in FILLINGS:
        guards = new_guards()
        steps = DraftSteps(
            max_requests=len(lens),
            branches=branches,
            steps=_STEPS,
            prefix_width=width,
            own_width=own_width,
            block_size=size,
            device=DEVICE,
        )
        rest = -1 if filling else 0
        table = torch.tensor(draft.prefix_table, dtype=I32).view(len(lens), width)
        blocks = torch.tensor(draft.branch_blocks, dtype=I32)
        for request, length in enumerate(lens):
            table[request, -(-length // size) if is_live[request] else 0 :] = rest
            if not is_live[request]:
                blocks[request] = rest
        prefix_lens = guards.place("prefix_lens", torch.tensor(lens, dtype=I32))
        stride = (1, len(lens) + 1) if draft.seed % 2 else None
        prefix_table = guards.place("prefix_table", table, stride=stride)
        branch_blocks = guards.place("branch_blocks", blocks)
        cache = new_cache(config, guards, draft.seed, None, filling)
        expected = _copied(draft, cache, is_live)
        guards.fill(filling)
        with watched():
            steps.fill(prefix_lens, prefix_table, branch_blocks)
            steps.copy_tails(cache, prefix_lens, prefix_table, branch_blocks)
        guards.check()
        for name, tensor in expected.items():
            given = cache.latents if name == "latents" else cache.scales
            known = ~tensor.isnan()
            same = as_bits(given).view(torch.uint8).cpu() == tensor
            assert bool((same | ~known).all()), f"{name} of copied tails"
        _hold_tables(draft, steps, is_live)


def _copied(draft: Draft, cache: Any, is_live: list[bool]) -> dict[str, torch.Tensor]:
    """Return the expected bytes of the cache as float; NaN where two copies overlap."""
    size = SETUPS[draft.config].config.block_size
    copies = []
    for request, length in enumerate(draft.prefix_lens):
        if is_live[request] and length % size:
            source = draft.prefix_table[request][length // size]
            copies += [
                (source, branch[0], length % size)
                for branch in draft.branch_blocks[request]
                if 0 <= source < NUM_BLOCKS and 0 <= branch[0] < NUM_BLOCKS
            ]
    targets = [target for _, target, _ in copies]
    sources = {source for source, target, _ in copies if source != target}
    met = {t for t in targets if targets.count(t) > 1 or t in sources}
    met |= {target for source, target, _ in copies if source in met or target in met}
    found = {"latents": cache.latents}
    if cache.scales is not None and cache.scales.ndim:
        found["scales"] = cache.scales
    for name, tensor in found.items():
        before = as_bits(tensor).view(torch.uint8).cpu().float()
        after = before.clone()
        for source, target, filled in copies:
            if name == "latents":
                after[target, :filled] = before[source, :filled]
            else:
                share = size // tensor.shape[2]
                scales = -(-filled // share) * 4
                after[target, 0, :scales] = before[source, 0, :scales]
        after[sorted(met)] = math.nan
        found[name] = after
    return found


def _hold_tables(draft: Draft, steps: DraftSteps, is_live: list[bool]) -> None:
    size, width = SETUPS[draft.config].config.block_size, len(draft.prefix_table[0])
    tables, lens = steps.block_table.tolist(), steps.seq_lens.tolist()
    branches = len(draft.branch_blocks[0])
    for request, length in enumerate(draft.prefix_lens):
        for branch, own in enumerate(draft.branch_blocks[request]):
            row = request * branches + branch
            wanted = [length + step + 1 if is_live[request] else 0 for step in range(_STEPS)]
            assert [of_step[row] for of_step in lens] == wanted, f"seq_lens of row {row}"
            line = [-1] * (width + len(own))
            if is_live[request]:
                shared = draft.prefix_table[request][: length // size]
                line[: len(shared) + len(own)] = [*shared, *own]
            assert tables[row] == line, f"block_table of row {row}: {tables[row]}, not {line}"


@dataclass(frozen=True)
class Window:
    """The committed lengths of rows and the number of tokens that extend each row."""

    committed: tuple[int, ...]
    window: int


@st.composite
def windows(draw: Draw, first: tuple[str, str]) -> Window:
    """Draw lengths; one of them has the `first` kind of error."""
    numbers = {
        "negative": below_zero(),
        "zero": st.just(0),
        "too large": st.integers(HIGHEST - 20, HIGHEST),
    }
    lens = draw(st.lists(st.integers(-3, 40), max_size=4))
    at = draw(st.integers(0, len(lens)))
    committed = (*lens[:at], draw(numbers[first[1]]), *lens[at:])
    return Window(committed, draw(st.sampled_from([1, 2, 3, 5, 8, 64])))


def wrong_in_window(window: Window) -> set[tuple[str, str]]:
    """Return pairs of value and kind."""
    lens = window.committed
    found = {
        "negative": min(lens) < 0,
        "zero": 0 in lens,
        "too large": max(lens) > HIGHEST - window.window,
    }
    return {("committed", kind) for kind, is_so in found.items() if is_so}


def hold_window(window: Window) -> None:
    """Check that rows with committed tokens are extended, and that other rows get no tokens."""
    guards = new_guards()
    committed = guards.place("committed", torch.tensor(window.committed, dtype=I32))
    guards.fill(FILLINGS[0])
    extended = ExtendWindow(len(window.committed), window.window, DEVICE)
    with watched():
        extended.fill(committed)
    guards.check()
    for before, after in zip(window.committed, extended.seq_lens.tolist(), strict=True):
        if 0 < before <= HIGHEST - window.window:
            assert after == before + window.window, f"{before} tokens became {after}"
        else:
            assert after <= 0, f"{before} tokens, of which no row is extended, became {after}"


@dataclass(frozen=True)
class Merge:
    """Partial results [n, pairs] of one head: the values of lse and of out."""

    lses: tuple[tuple[float, ...], ...]
    outs: tuple[float, ...]
    width: int


@st.composite
def merges(draw: Draw, first: tuple[str, str]) -> Merge:
    """Draw partial results; one number has the `first` kind of error."""
    count, pairs = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    number = st.floats(-30, 30, width=32) | st.just(-math.inf)
    lses = [[draw(number) for _ in range(pairs)] for _ in range(count)]
    outs = [draw(st.floats(-3, 3, width=32)) for _ in range(count)]
    numbers = {
        "negative": [-3e38, -math.inf],
        "zero": [0.0, -0.0],
        "too large": [3e38, math.inf],
        "inconsistent": [math.nan],
    }
    value, kind = first
    at = draw(st.integers(0, count - 1))
    if value == "lses":
        lses[at][draw(st.integers(0, pairs - 1))] = draw(st.sampled_from(numbers[kind]))
    else:
        outs[at] = draw(st.sampled_from(numbers[kind]))
    return Merge(tuple(map(tuple, lses)), tuple(outs), draw(st.sampled_from([1, 3, 16, 32])))


def wrong_in_merge(merge: Merge) -> set[tuple[str, str]]:
    """Return pairs of value and kind."""
    found = set()
    for value, given in (("lses", [x for line in merge.lses for x in line]), ("outs", merge.outs)):
        for number in given:
            if math.isnan(number):
                found.add((value, "inconsistent"))
            elif number == 0:
                found.add((value, "zero"))
            elif number > 1e38:
                found.add((value, "too large"))
            elif number < -1e38:
                found.add((value, "negative"))
    return found


def hold_merge(merge: Merge) -> None:
    """Check that pairs of finite numbers are merged as in float64, next to any other pairs."""
    lses = torch.tensor(merge.lses, dtype=torch.float32)
    shape = (*lses.shape, 1, merge.width)
    outs = torch.tensor(merge.outs, dtype=torch.float32)[:, None, None, None].expand(shape).clone()
    ran = []
    for filling in FILLINGS:
        guards = new_guards()
        given = outs.clone()
        given[lses == -math.inf] = math.nan if filling else 0.0
        placed = guards.place("outs", given), guards.place("lses", lses[..., None])
        guards.fill(filling)
        with watched():
            out, lse = merge_partials(*placed)
        guards.check()
        ran.append((out.cpu(), lse.cpu()))
    for one, other in zip(*ran, strict=True):
        assert torch.equal(as_bits(one), as_bits(other)), (
            "the result depends on memory that must not be read"
        )
    empty = lses == -math.inf
    plain = (empty | lses.abs().lt(1e30)) & (empty | outs[:, :, 0, 0].abs().lt(1e30))
    for pair in plain.all(0).nonzero().flatten().tolist():
        column = lses[:, pair].double()
        total = column.logsumexp(0)
        weights = (column - total).exp().nan_to_num(0.0)
        values = torch.tensor(merge.outs, dtype=torch.float64).where(~empty[:, pair], 0.0)
        expected = (weights * values).sum().expand(1, merge.width)
        torch.testing.assert_close(ran[0][0][pair].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ran[0][1][pair, 0].double(), total, rtol=1e-4, atol=1e-4)
