"""A minimal serving loop over this backend. Copy it and replace the model by yours.

It has continuous batching, chunked prefill, prefix reuse, preemption, drafts, CUDA graphs and
greedy sampling:

    python examples/serving_loop.py    # on a CPU with TRITON_INTERPRET=1
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

import torch
from tiny_model import Model, config_of

from paged_mla_optimized import Bucket, GraphedStep, MlaLayer, MlaStep, StepInputs, StepView


@dataclass(eq=False)
class Request:
    """A request that ends at `end` tokens; the keys of its first `cached` tokens are in blocks."""

    tokens: list[int]
    end: int
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


class Row(NamedTuple):
    """The tokens of a request in a step, which are not cached yet; the last ones are drafts."""

    request: Request
    new: list[int]
    drafts: int


class Blocks:
    """The cache's blocks: the number of requests that use each, and the tokens up to its end."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.users, self.block_of, self.text_of = size, [0] * count, {}, {}
        self.free = dict.fromkeys(range(count))  # a queue: the block that was freed first is used

    def reuse(self, request: Request) -> None:
        """Start a request with cached blocks that match its tokens; compute at least one token."""
        ends = range(self.size, len(request.tokens), self.size)
        found = (self.block_of.get(tuple(request.tokens[:end])) for end in ends)
        request.blocks = list(takewhile(lambda block: block is not None, found))
        request.cached = len(request.blocks) * self.size
        for block in request.blocks:
            self.free.pop(block, None)
            self.users[block] += 1

    def grow(self, request: Request) -> None:
        """Add a free block to a request; the old contents of the block can no longer be reused."""
        request.blocks.append(block := next(iter(self.free)))
        del self.free[block]
        self.users[block] = 1
        self.block_of.pop(self.text_of.pop(block, None), None)

    def commit(self, request: Request, first: int) -> None:
        """Make the blocks reusable that became full since `first` tokens were cached."""
        for index in range(first // self.size, request.cached // self.size):
            block, text = request.blocks[index], tuple(request.tokens[: (index + 1) * self.size])
            if self.block_of.setdefault(text, block) == block:
                self.text_of[block] = text

    def release(self, request: Request) -> None:
        """Release a request's blocks; the last ones are freed first, and so are used first."""
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free[block] = None
        request.blocks, request.cached = [], 0


class Server:
    """A server of requests; each step runs decode rows and then chunks of prompts."""

    def __init__(self, model: Model, device: str, num_blocks: int, drafts: int = 3) -> None:
        config = self.config = model.config.attention
        self.model, self.drafts, self.blocks = model, drafts, Blocks(num_blocks, config.block_size)
        self.waiting, self.running, self.counts = [], [], Counter()
        self.mla, self.graphs = MlaLayer(model.config, device), None
        self.caches = [self.mla.new_cache(num_blocks) for _ in model.layers]
        ids = ((config.max_query_tokens,), torch.int64, 0)  # padded tokens have id 0
        self.inputs = inputs = StepInputs(config, device, {"ids": ids})
        if device == "cuda":  # graphs run steps in which all rows decode or verify drafts
            buckets = [Bucket(config.max_rows * (1 + drafts), config.max_rows, 1 + drafts)]
            self.graphs = GraphedStep([self.mla], self.run, inputs, buckets, caches=self.caches)

    def add(self, prompt: list[int], new: int) -> None:
        """Queue a request that generates `new` tokens after its prompt."""
        room = min(self.config.max_model_len, len(self.blocks.users) * self.blocks.size)
        if not prompt or new < 1 or len(prompt) + new > room:
            counts = f"a prompt of {len(prompt)} tokens and {new} new tokens"
            raise ValueError(f"got {counts}; allowed: at least 1 of each, at most {room} together")
        self.waiting.append(Request(list(prompt), len(prompt) + new))

    def run(self, step: StepView) -> torch.Tensor:
        """Run the model on the planned step; return the predicted next token for each token."""

        def attend(layer, q_nope, q_pe, ckv, k_pe):
            self.mla.append(ckv, k_pe, self.caches[layer])
            return self.mla.attend(q_nope, q_pe, self.caches[layer], self.model.heads[layer])[0]

        return self.model(step.tokens["ids"], attend)

    def schedule(self) -> list[Row]:
        """Return the rows of a step, shortest first, because `MlaLayer` absorbs the first rows."""
        while self.waiting and len(self.running) < self.config.max_rows and self.blocks.free:
            self.running.append(self.waiting.pop(0))
            self.blocks.reuse(self.running[-1])
            self.counts["reused"] += self.running[-1].cached
        rows, room = [], self.config.max_query_tokens
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):
            new = request.tokens[request.cached :][:room]
            is_last = request.cached + len(new) == len(request.tokens)  # no chunk follows
            most = min(self.drafts, request.end - len(request.tokens) - 1, room - len(new))
            drafts = guess(request.tokens, most) if is_last else []
            row = Row(request, new + drafts, len(drafts))
            if new and request in self.running and self.make_room(row, rows):
                rows.append(row)
                room -= len(row.new)
        return rows

    def make_room(self, row: Row, rows: list[Row]) -> bool:
        """Give a row its blocks; if none is free, preempt the latest requests without a row."""
        request, new, _ = row
        busy = {request, *(other.request for other in rows)}
        others = [other for other in self.running if other not in busy]
        while len(request.blocks) * self.blocks.size < request.cached + len(new):
            if self.blocks.free:
                self.blocks.grow(request)
            elif others:
                self.waiting.insert(0, others.pop())
                self.running.remove(self.waiting[0])
                self.blocks.release(self.waiting[0])
                self.counts["preempted"] += 1
            else:
                return False
        return True

    def step(self) -> list[Request]:
        """Run a step with all rows that fit; return the requests that end with it."""
        rows = self.schedule()
        if not rows:
            return []
        lens = [len(row.new) for row in rows]
        keys = [row.request.cached + len(row.new) for row in rows]
        tables = [row.request.blocks for row in rows]
        step = MlaStep.from_host(lens, keys, tables, device=self.mla.device)
        ids = torch.tensor([token for row in rows for token in row.new])
        self.inputs.load(step, {"ids": ids})
        if self.graphs and max(lens) <= 1 + self.drafts:  # a graph absorbs all rows
            answers = self.graphs.replay(len(rows), step.num_tokens, max(lens))
        else:
            self.mla.plan(step)
            answers = self.run(self.inputs.view(Bucket(step.num_tokens, len(rows))))
        found = iter(answers.tolist())  # waits for the device
        for row in rows:
            self.keep(*row, list(islice(found, len(row.new))))
        done = [request for request in self.running if len(request.tokens) == request.end]
        for request in done:
            self.running.remove(request)
            self.blocks.release(request)
        return done

    def keep(self, request: Request, new: list[int], drafts: int, answers: list[int]) -> None:
        """Keep the correct tokens of a row: `answers[i]` is the token that follows `new[i]`.

        A later step overwrites the cached keys of wrong drafts, which no query reads before.
        """
        first, known, right = request.cached, len(new) - drafts, 0
        request.cached += known
        if request.cached < len(request.tokens):
            self.counts["chunks"] += 1
        else:
            while right < drafts and new[known + right] == answers[known - 1 + right]:
                right += 1
            request.tokens += answers[known - 1 : known + right]
            request.cached += right
            self.counts += Counter(accepted_drafts=right, rejected_drafts=drafts - right)
        self.blocks.commit(request, first)


def guess(tokens: list[int], count: int) -> list[int]:
    """Return drafts: the tokens after the last earlier occurrence of the last two tokens."""
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == tokens[-2:]:
            return tokens[at + 2 : at + 2 + count]
    return []


if __name__ == "__main__":
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    server = Server(Model(config_of(DEVICE), DEVICE), DEVICE, num_blocks=12)
    for n in range(7):
        server.add([*range(40 - n), 50 + n, 50 + n], 20)
    while server.waiting or server.running:
        for finished in server.step():
            print(finished.tokens)
    print(server.counts)
