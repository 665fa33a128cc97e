"""The smallest serving loop over this backend: copy it, and put your model in.

Continuous batching, prefix reuse, chunked prefill, drafts and CUDA graphs, greedy:

    python examples/serving_loop.py    # on a CPU with TRITON_INTERPRET=1
"""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import torch
from tiny_model import Model, config_of

from paged_mla_optimized import Bucket, GraphedStep, PagedMla, StepInputs


@dataclass
class Request:
    """Tokens so far, of `end` that it will have; latents of the first `cached` are in blocks."""

    tokens: list[int]
    end: int
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


class Blocks:
    """Who uses each block, and which text a full one ends, also after its request is gone."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.users = size, [0] * count
        self.free = dict.fromkeys(range(count))  # a queue: freed last, taken last
        self.block_of, self.text_of = {}, {}

    def admit(self, request: Request) -> bool:
        """Give a request all blocks it will need, beginning with cached ones, if there are."""
        ends = range(self.size, len(request.tokens), self.size)  # one token is left to compute
        found = (self.block_of.get(tuple(request.tokens[:end])) for end in ends)
        shared = list(itertools.takewhile(lambda block: block is not None, found))
        free = [block for block in self.free if block not in shared]
        missing = -(-request.end // self.size) - len(shared)
        if missing > len(free):
            return False
        for block in free[:missing]:  # what it held is forgotten
            self.block_of.pop(self.text_of.pop(block, None), None)
        request.blocks, request.cached = shared + free[:missing], len(shared) * self.size
        for block in request.blocks:
            self.free.pop(block, None)
            self.users[block] += 1
        return True

    def commit(self, request: Request, first: int) -> None:
        """Let others find the blocks that filled up since `first` tokens were cached."""
        for index in range(first // self.size, request.cached // self.size):
            text = tuple(request.tokens[: (index + 1) * self.size])
            if text not in self.block_of:
                self.block_of[text] = request.blocks[index]
                self.text_of[request.blocks[index]] = text

    def release(self, request: Request) -> None:
        """Take a request's blocks back; those of its end will be taken first."""
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free[block] = None


def guess(tokens: list[int], count: int) -> list[int]:
    """Return drafts: what followed when the last two tokens were there before."""
    for at in range(len(tokens) - 3, -1, -1):
        if tokens[at : at + 2] == tokens[-2:]:
            return tokens[at + 2 : at + 2 + count]
    return []


class Server:
    """Requests in, tokens out; each step runs decode rows, then chunks of prompts."""

    def __init__(self, model: Model, device: str, num_blocks: int, drafts: int = 3) -> None:
        config = self.config = model.config
        self.model, self.drafts, self.blocks = model, drafts, Blocks(num_blocks, config.block_size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.mla = PagedMla(config, device)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        shape = (len(model.layers), num_blocks, config.block_size, width)
        self.caches = torch.empty(shape, dtype=config.dtype, device=device)
        ids = ((config.max_query_tokens,), torch.int64, 0)  # padded tokens have id 0
        self.inputs = StepInputs(config, device, {"ids": ids})
        self.run = self.run_eagerly
        if device == "cuda":  # graphs for one row, for all rows, and for steps with prompts
            rows, verify = config.max_rows, 1 + drafts
            buckets = [Bucket(verify, 1, verify), Bucket(rows * verify, rows, verify)]
            buckets += [Bucket(config.max_query_tokens, rows)]
            caches = [*self.caches]
            graphs = GraphedStep([self.mla], self.layers, self.inputs, buckets, caches=caches)
            self.run = graphs.replay

    def add(self, prompt: list[int], new: int) -> None:
        """Queue a request for `new` tokens."""
        end = len(prompt) + new
        room = min(self.config.max_model_len, len(self.blocks.users) * self.blocks.size)
        if not prompt or new < 1 or end > room:
            raise ValueError(f"{len(prompt)} and {new} tokens: both >= 1, {room} at most in all")
        self.waiting.append(Request(list(prompt), end))

    def layers(self, view):
        """Run the model on a planned step."""

        def attend(layer, q_nope, q_pe, ckv, k_pe):
            self.mla.append(ckv, k_pe, self.caches[layer])
            return self.mla.attend(q_nope, q_pe, self.caches[layer])[0]

        return self.model(view.tokens["ids"], attend)

    def run_eagerly(self, rows: int, tokens: int, longest: int):
        """Do what a replay does, without a graph."""
        view = self.inputs.view(Bucket(tokens, rows, longest))
        lengths = view.cu_seqlens_q, view.seq_lens, view.block_table
        self.mla.plan(*lengths, num_tokens=tokens, max_query_len=longest)
        return self.layers(view)

    def schedule(self) -> list[tuple[Request, list[int], int]]:
        """Return rows: requests, their new tokens, and how many of these are drafts."""
        while self.waiting and len(self.running) < self.config.max_rows:
            if not self.blocks.admit(self.waiting[0]):
                break
            self.running.append(self.waiting.pop(0))
            self.counts["reused"] += self.running[-1].cached
        rows, room = [], self.config.max_query_tokens
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached):
            new, drafts = request.tokens[request.cached :][:room], []
            if request.cached + len(new) == len(request.tokens):  # else a chunk of its prompt
                most = min(self.drafts, request.end - len(request.tokens) - 1, room - len(new))
                drafts = guess(request.tokens, most)
            if new:
                rows.append((request, new + drafts, len(drafts)))
                room -= len(new) + len(drafts)
        return rows

    def step(self) -> list[Request]:
        """Run all rows that fit; return the requests that this completed."""
        rows = self.schedule()
        if not rows:
            return []
        lens = [len(new) for _, new, _ in rows]
        width = max(len(request.blocks) for request, _, _ in rows)
        table = [request.blocks + [0] * (width - len(request.blocks)) for request, _, _ in rows]
        self.inputs.load(
            torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
            torch.tensor([r.cached + len(new) for r, new, _ in rows], dtype=torch.int32),
            torch.tensor(table, dtype=torch.int32),
            ids=torch.tensor([token for _, new, _ in rows for token in new]),
        )
        answers = iter(self.run(len(rows), sum(lens), max(lens)).tolist())  # waits for the device
        for request, new, drafts in rows:
            self.take(request, new, drafts, list(itertools.islice(answers, len(new))))
        done = [request for request in self.running if len(request.tokens) == request.end]
        for request in done:
            self.running.remove(request)
            self.blocks.release(request)
        return done

    def take(self, request: Request, new: list[int], drafts: int, answers: list[int]) -> None:
        """Keep what a row's answers prove; what it cached past that, a later step overwrites."""
        first, known = request.cached, len(new) - drafts
        request.cached += known
        if request.cached < len(request.tokens):
            self.counts["chunks"] += 1
        else:
            right = 0
            while right < drafts and new[known + right] == answers[known - 1 + right]:
                right += 1
            request.tokens += answers[known - 1 : known + right]
            request.cached += right
            self.counts += Counter(accepted_drafts=right, rejected_drafts=drafts - right)
        self.blocks.commit(request, first)


def main() -> None:
    """Serve prompts that begin alike."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    server = Server(Model(config_of(device), device), device, num_blocks=24)
    for n in range(7):
        server.add([*range(40 - n), 50 + n, 50 + n], 20)
    while server.waiting or server.running:
        for request in server.step():
            print(request.tokens)
    print(server.counts)


if __name__ == "__main__":
    main()
