"""Random schedules: a seed determines an engine and its traffic."""

from __future__ import annotations

import random

from paged_mla_reference.rules.parallel import UNDIVIDED, ContextParallel
from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig, RowOrder
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.workloads import WORKLOADS
from paged_mla_shared.problem import MaskSpelling, RopePairing


def generated(seed: int) -> Scenario:
    """Return random schedule number `seed`: a small engine with any features of the simulator."""
    rng = random.Random(seed)
    workload = rng.choice(list(WORKLOADS))
    config = random_config(rng)
    requests = WORKLOADS[workload](rng.randrange(1 << 30), rng.randint(4, 9), rng.choice([4, 8]))
    return Scenario(
        name=f"generated-{seed}",
        why=f"a random engine under {workload}",
        config=config,
        requests=tuple(request for request in requests if fits(config, request)),
        rope=rng.choice([None, None, *RopePairing]) if config.group.world == 1 else None,
        mask_spelling=rng.choice(list(MaskSpelling)),
    )


def random_config(rng: random.Random) -> EngineConfig:
    """Return the random configuration of a small engine, which often has too few blocks."""
    drafts = rng.choice([None, _chain(rng), _tree(rng)])
    divided = rng.random() < 0.25 and (drafts is None or drafts.kind is DraftKind.CHAIN)
    block_size = rng.choice([1, 2, 4, 8, 16])
    group = ContextParallel(rng.randint(2, 3), rng.choice([1, block_size])) if divided else None
    span = block_size * (group.world if group else 1)
    return EngineConfig(
        block_size=block_size,
        num_blocks=rng.choice([90, 140, 250]) // span + 2,
        max_rows=rng.randint(2, 6),
        token_budget=rng.choice([8, 16, 48]),
        max_chunk=rng.choice([1, 5, 16, 48]),
        order=rng.choice(list(RowOrder)),
        drafts=drafts,
        buckets=rng.choice([(), (1, 2, 4, 8, 16, 32), (6, 20)]),
        padded_query_len=rng.randint(0, 1),
        group=group or UNDIVIDED,
        seed=rng.randrange(1 << 30),
    )


def fits(config: EngineConfig, request: Request) -> bool:
    """Return whether all blocks together can hold a request."""
    return len(request.tokens) <= config.longest


def _chain(rng: random.Random) -> Drafts:
    depth, multi_step = rng.randint(1, 5), rng.random() < 0.4
    return Drafts(kind=DraftKind.CHAIN, depth=depth, multi_step=multi_step)


def _tree(rng: random.Random) -> Drafts:
    return Drafts(
        kind=DraftKind.TREE,
        depth=rng.randint(1, 4),
        branches=rng.randint(1, 4),
        acceptance=rng.choice([0.3, 0.8]),
        multi_step=rng.random() < 0.5,
    )
