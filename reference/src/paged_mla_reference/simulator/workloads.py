"""Seeded workloads: kinds of traffic that stress a paged cache.

Each workload takes a seed, a number of requests (of chats for ``multi_turn``), and a number of
tokens that scales the lengths of prompts and outputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.speculation import VOCABULARY

Tokens = tuple[int, ...]


def tokens(rng: random.Random, count: int) -> Tokens:
    """Return `count` random token ids."""
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def near(rng: random.Random, length: int) -> int:
    """Return a random length, about 0.5 to 1.5 times `length` and at least 1."""
    return max(1, length + rng.randint(-length // 2, length // 2))


def shared_system_prompt(seed: int, count: int, length: int) -> tuple[Request, ...]:
    """Return requests that share one system prompt; some have an adapter or a salt."""
    rng = random.Random(seed)
    system = tokens(rng, 2 * length)
    extra = [(), (), (), ("adapter-a",), ("salt-1", "adapter-a")]
    return tuple(
        Request(
            id=f"ask-{i}",
            prompt=system + tokens(rng, rng.choice([0, 1, 2, near(rng, length)])),
            output=tokens(rng, near(rng, length)),
            arrival=i * rng.randrange(4),
            extra_keys=rng.choice(extra),
        )
        for i in range(count)
    )


def multi_turn(seed: int, count: int, length: int) -> tuple[Request, ...]:
    """Return the turns of chats; each turn's prompt has all earlier turns and a new question."""
    rng = random.Random(seed)
    requests = []
    for chat in range(count):
        history, arrival = tokens(rng, length), rng.randrange(6)
        for turn in range(rng.randint(2, 3)):
            output = tokens(rng, near(rng, length))
            requests.append(Request(f"chat-{chat}.{turn}", history, output, arrival))
            history += output + tokens(rng, rng.randint(1, length))
            arrival += len(output) + rng.randrange(12)
    return tuple(requests)


def long_documents(seed: int, count: int, length: int) -> tuple[Request, ...]:
    """Return long prompts with short outputs, mixed with short prompts with long outputs."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        sizes = (near(rng, 6 * length), rng.randint(1, 4))
        if i % 2:
            sizes = (rng.randint(1, 4), near(rng, 2 * length))
        prompt, output = (tokens(rng, size) for size in sizes)
        requests.append(Request(f"doc-{i}", prompt, output, arrival=rng.randrange(8)))
    return tuple(requests)


def bursts(seed: int, count: int, length: int) -> tuple[Request, ...]:
    """Return requests that arrive in bursts; some clients abort."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        arrival = 2 + 3 * length * rng.randrange(3)
        abort = arrival + rng.randrange(2 * length) if rng.random() < 0.2 else None
        prompt, output = tokens(rng, near(rng, length)), tokens(rng, near(rng, length))
        requests.append(Request(f"burst-{i}", prompt, output, arrival, abort=abort))
    return tuple(requests)


def agents(seed: int, count: int, length: int) -> tuple[Request, ...]:
    """Return requests of agents that fork one common context at random tokens."""
    rng = random.Random(seed)
    trunk = tokens(rng, 4 * length)
    return tuple(
        Request(
            id=f"agent-{i}",
            prompt=trunk[: rng.randint(length, len(trunk))] + tokens(rng, rng.randint(1, 3)),
            output=tokens(rng, near(rng, length)),
            arrival=rng.randrange(3 * count),
        )
        for i in range(count)
    )


WORKLOADS: dict[str, Callable[[int, int, int], tuple[Request, ...]]] = {
    "shared_system_prompt": shared_system_prompt,
    "multi_turn": multi_turn,
    "long_documents": long_documents,
    "bursts": bursts,
    "agents": agents,
}
