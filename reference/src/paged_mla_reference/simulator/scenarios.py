"""Named schedules: short schedules that together reach every situation of the coverage table."""

from __future__ import annotations

import random

from paged_mla_reference.rules.parallel import ContextParallel
from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig, RowOrder
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.workloads import tokens
from paged_mla_shared.problem import MaskSpelling, RopePairing


def request(
    name: str,
    prompt: int,
    output: int,
    arrival: int = 0,
    *,
    after: tuple[int, ...] = (),
    extra_keys: tuple[str, ...] = (),
    abort: int | None = None,
) -> Request:
    """Return a request whose prompt is `after` followed by `prompt` random tokens."""
    rng = random.Random(name)
    return Request(
        id=name,
        prompt=after + tokens(rng, prompt),
        output=tokens(rng, output),
        arrival=arrival,
        extra_keys=extra_keys,
        abort=abort,
    )


TRUNK = tokens(random.Random("trunk"), 24)

_CHUNKS = Scenario(
    name="chunks",
    why="prompts in chunks of any size, the last with one token, together with decode rows",
    config=EngineConfig(block_size=16, num_blocks=20, token_budget=18, max_chunk=9),
    requests=(
        request("short", 3, 9),
        request("nine-and-one", 10, 3),
        request("edges", 33, 2, 2),
        request("late", 18, 3, 3),
    ),
    rope=RopePairing.INTERLEAVED,
)

_PREFIXES = Scenario(
    name="prefixes",
    why="hits whose prompts end before, at and after a block edge, and evictions of shared blocks, "
    "whose prefix is requested again",
    config=EngineConfig(
        block_size=8,
        num_blocks=8,
        max_rows=4,
        token_budget=20,
        order=RowOrder.AS_ARRIVED,
    ),
    requests=(
        request("trunk", 1, 4, after=TRUNK),
        request("one-before", 7, 3, 3, after=TRUNK[:16]),
        request("at-edge", 8, 2, 3, after=TRUNK[:8]),
        request("one-after", 1, 3, 4, after=TRUNK[:16]),
        request("whole", 0, 2, 7, after=TRUNK[:16]),
        request("salted", 2, 2, 8, after=TRUNK[:16], extra_keys=("salt",)),
        request("adapter", 2, 2, 9, after=TRUNK[:16], extra_keys=("adapter-a",)),
        request("crowd", 50, 2, 12),
        request("evicted", 3, 2, 18, after=TRUNK[:16]),
    ),
)

_LOOKALIKES = Scenario(
    name="lookalikes",
    why="prompts that differ in the last token of a block, or have equal blocks in another order",
    config=EngineConfig(block_size=4, num_blocks=24, max_rows=3, token_budget=12, max_chunk=5),
    requests=(
        request("one", 2, 3, after=TRUNK[:8]),
        request("last-token-differs", 2, 3, 5, after=(*TRUNK[:3], TRUNK[4], *TRUNK[4:8])),
        request("swapped-blocks", 2, 3, 10, after=TRUNK[4:8] + TRUNK[:4]),
        request("again", 3, 2, 14, after=TRUNK[:8]),
    ),
)

_PREEMPTION = Scenario(
    name="preemption",
    why="a request that loses its blocks and finds some of them in the cache when it is resumed",
    config=EngineConfig(
        block_size=4,
        num_blocks=11,
        max_rows=3,
        token_budget=16,
        order=RowOrder.INTERLEAVED,
        seed=3,
    ),
    requests=(
        request("first", 9, 12),
        request("second", 10, 10),
        request("third", 9, 8, 1),
        request("gives-up", 5, 20, 2, abort=14),
        request("never-starts", 5, 20, 2, abort=3),
    ),
    rope=RopePairing.NEOX,
)

_CHAINS = Scenario(
    name="chains",
    why="chains of drafts, accepted in part, mixed with prompts and padded to graphs",
    config=EngineConfig(
        block_size=16,
        num_blocks=24,
        max_rows=6,
        token_budget=32,
        max_chunk=11,
        order=RowOrder.INTERLEAVED,
        drafts=Drafts(kind=DraftKind.CHAIN, depth=3, acceptance=0.7),
        buckets=(1, 2, 4, 8),
        seed=5,
    ),
    requests=(
        request("a", 14, 12),
        request("b", 2, 16, 1),
        request("c", 30, 9, 2),
        request("d", 6, 5, 5),
        request("much-later", 5, 4, 16),
    ),
)

_TREES = Scenario(
    name="trees",
    why="draft trees that are verified at once, and windows that write accepted tokens again",
    config=EngineConfig(
        block_size=16,
        num_blocks=24,
        max_rows=4,
        token_budget=32,
        drafts=Drafts(kind=DraftKind.TREE, depth=3, branches=3, acceptance=0.75),
        buckets=(2, 4),
        padded_query_len=1,
        seed=2,
    ),
    requests=(
        request("a", 15, 16),
        request("b", 3, 15),
        request("c", 20, 12),
        request("d", 9, 24, 2),
    ),
    rope=RopePairing.INTERLEAVED,
)

_BRANCHES = Scenario(
    name="branches",
    why="drafts that first run through the cache, on their own blocks",
    config=EngineConfig(
        block_size=8,
        num_blocks=48,
        max_rows=3,
        token_budget=32,
        drafts=Drafts(kind=DraftKind.TREE, depth=2, branches=3, acceptance=0.6, multi_step=True),
        buckets=(4, 12),
        seed=4,
    ),
    requests=(request("below-a-block", 5, 9), request("partial", 13, 7)),
    mask_spelling=MaskSpelling.PACKED,
)

_RANKS = Scenario(
    name="ranks",
    why="a cache that is divided between two ranks, one of which has no key at first",
    config=EngineConfig(
        block_size=8,
        num_blocks=16,
        max_rows=3,
        token_budget=12,
        max_chunk=7,
        drafts=Drafts(kind=DraftKind.CHAIN, depth=2),
        group=ContextParallel(2, 4),
        buckets=(4,),
        seed=1,
    ),
    requests=(request("tiny", 2, 6), request("longer", 17, 6), request("hit", 3, 3, 6)),
)

_PRODUCTION = Scenario(
    name="production",
    why="a long prompt in long chunks together with many short requests",
    config=EngineConfig(
        block_size=64,
        num_blocks=64,
        max_rows=40,
        token_budget=640,
        max_chunk=600,
        order=RowOrder.INTERLEAVED,
        buckets=(32,),
        seed=6,
    ),
    requests=(
        *(request(f"short-{i}", 1 + i % 5, 3) for i in range(15)),
        request("long", 1300, 8),
        *(request(f"late-{i}", 2 + i % 7, 3, 1) for i in range(16)),
    ),
    num_heads=1,
)

CORE: tuple[Scenario, ...] = (
    _CHUNKS,
    _PREFIXES,
    _LOOKALIKES,
    _PREEMPTION,
    _CHAINS,
    _TREES,
    _BRANCHES,
    _RANKS,
    _PRODUCTION,
)


def core_scenario(name: str) -> Scenario:
    """Return a core scenario by name."""
    return next(scenario for scenario in CORE if scenario.name == name)
