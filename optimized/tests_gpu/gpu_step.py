"""Steps of a model of four attention layers on a GPU, at DeepSeek-V3 dims."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paged_mla_optimized import LatentCache, MlaConfig, PagedMla, StepInputs, StepView
from paged_mla_optimized.planning.choice import demand_of
from paged_mla_optimized.planning.families import PORTABLE, portable_variant, serving_variant
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.problem import Rope, RopePairing

R, P, LAYERS, BLOCKS = 512, 64, 4, 640
CONFIG = MlaConfig(
    num_heads=16,
    softmax_scale=192**-0.5,
    block_size=64,
    max_rows=16,
    max_query_tokens=128,
    max_model_len=4096,
)
TREE = {"max_draft_tokens": 8}
CONFIGS = {
    "causal": CONFIG,
    "non_causal": replace(CONFIG, mask="non_causal"),
    "batch_invariant": replace(CONFIG, batch_invariant=True),
    "rope": replace(CONFIG, rope=Rope(RopePairing.INTERLEAVED)),
    "tree:qlen": replace(CONFIG, mask="tree:qlen", **TREE),
    "tree:full": replace(CONFIG, mask="tree:full", **TREE),
    "tree:packed": replace(CONFIG, mask="tree:packed", **TREE),
}


@dataclass
class Batch:
    """One step on the device, no padding but the rows that have no tokens."""

    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    mask: torch.Tensor | None
    tokens: dict[str, torch.Tensor]
    live_slots: torch.Tensor  # of cached tokens, before the step

    @property
    def rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens["q"])

    def load(self, inputs: StepInputs) -> None:
        """Write the batch into fixed tensors."""
        lengths = (self.cu_seqlens_q, self.seq_lens, self.block_table)
        inputs.load(MlaStep(*lengths, num_tokens=self.num_tokens, mask=self.mask), self.tokens)


def token_tensors(config: MlaConfig) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the tensors a step of the model reads: queries, and latents with keys."""
    tokens, dtype = config.max_query_tokens, config.dtype
    return {
        "q": ((tokens, LAYERS, config.num_heads, R + P), dtype),
        "kv": ((tokens, LAYERS, R + P), dtype),
    }


def make_batch(config: MlaConfig, lens: list[tuple[int, int]], seed: int) -> Batch:
    """Return a step of rows (context_len, query_len) with random contents and blocks."""
    generator = torch.Generator().manual_seed(seed)
    size = config.block_size
    seq_lens = [context + query for context, query in lens]
    counts = [-(-n // size) for n in seq_lens]
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    table = torch.full((len(lens), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
    slots: list[torch.Tensor] = []
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
        key = torch.arange(lens[row][0])
        slots.append(table[row].long()[key // size] * size + key % size)
    query_lens = torch.tensor([query for _, query in lens], dtype=torch.int32)
    tokens = int(query_lens.sum())

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(config.dtype).cuda()

    return Batch(
        torch.nn.functional.pad(query_lens.cumsum(0), (1, 0)).int().cuda(),
        torch.tensor(seq_lens, dtype=torch.int32).cuda(),
        table.cuda(),
        _mask(config, lens, generator) if config.is_tree else None,
        {
            "q": normal(tokens, LAYERS, config.num_heads, R + P),
            "kv": normal(tokens, LAYERS, R + P),
        },
        torch.cat(slots).cuda(),
    )


def random_lens(config: MlaConfig, rows: int, tokens: int, seed: int) -> list[tuple[int, int]]:
    """Return rows (context_len, query_len), some empty, of at most `tokens` query tokens."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    longest = config.max_draft_tokens or 64
    lens, left = [], tokens - rows
    for _ in range(rows):
        if number(0, 7) == 0:
            lens.append((0, 0))
            continue
        query = 1 + number(0, min(left, longest - 1)) * number(0, 1)
        left -= query - 1
        context = number(0, 40 if number(0, 2) == 0 else 2000)
        lens.append((context, query))
    return lens


def _mask(
    config: MlaConfig, lens: list[tuple[int, int]], generator: torch.Generator
) -> torch.Tensor:
    lines: list[torch.Tensor] = []
    for context, query in lens:
        tree = torch.eye(query, dtype=torch.bool)
        for node in range(1, query):
            tree[node] |= tree[int(torch.randint(0, node, (1,), generator=generator))]
        if config.mask == "tree:packed":
            bits = torch.nn.functional.pad(tree, (0, 8 - query)).to(torch.uint8)
            lines.append((bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8))
        elif config.mask == "tree:full":
            seen = torch.ones(query, context, dtype=torch.bool)
            lines.append(torch.cat([seen, tree], dim=1).ravel())
        else:
            lines.append(tree.ravel())
    mask = torch.cat(lines).cuda()
    return mask[:, None] if config.mask == "tree:packed" else mask


def _contents(config: MlaConfig, generator: torch.Generator) -> torch.Tensor:
    """Return random rows of four caches, those of FP8 formats as bytes."""
    size = (LAYERS, BLOCKS, config.block_size, R + P)
    contents = torch.randn(size, generator=generator, dtype=torch.float32, device="cuda")
    if not config.is_fp8:
        return contents.to(config.dtype)
    codes = contents.to(torch.float8_e4m3fn).view(torch.uint8)
    shares = config.stored.inline_scales
    if shares == 0:
        return codes
    scales = 0.35 + torch.rand((*size[:3], shares), generator=generator, device="cuda")
    k_pe = contents[..., R:].bfloat16()
    return torch.cat([codes[..., :R], scales.view(torch.uint8), k_pe.view(torch.uint8)], dim=-1)


class Model:
    """Four layers that append and attend, with separate caches and outputs.

    Rows of caches have one type; rows of FP8 formats are bytes. Its steps have `max_query_len`.
    """

    def __init__(self, mla: PagedMla, max_query_len: int | None = None) -> None:
        config = mla.config
        self.mla, self.max_query_len = mla, max_query_len
        generator = torch.Generator("cuda").manual_seed(0)  # every model caches the same
        self.contents = _contents(config, generator)
        self.caches = torch.zeros_like(self.contents)
        self.scales = self.scale_contents = None
        shape = config.stored.scale_shape(BLOCKS, config.block_size)
        if shape is not None:
            random = torch.rand((LAYERS, *shape), generator=generator, device="cuda")
            self.scale_contents = 0.35 + random
            self.scales = self.scale_contents.clone()
        shape = (LAYERS, config.max_query_tokens, config.num_heads)
        self.outs = torch.zeros((*shape, R), dtype=config.dtype, device="cuda")
        self.lses = torch.zeros(shape, dtype=torch.float32, device="cuda")

    def restore(self, batch: Batch) -> None:
        """Fill the caches with NaN, but for what the batch's rows have cached."""
        config = self.mla.config
        self.caches.fill_(0xFF if config.is_fp8 else torch.nan)  # NaN in whatever bytes make
        live, contents = self.caches.flatten(1, 2), self.contents.flatten(1, 2)
        live[:, batch.live_slots] = contents[:, batch.live_slots]
        per_block = config.stored.scales_per_block(config.block_size)
        if per_block:
            groups = batch.live_slots // (config.block_size // per_block)
            self.scales.fill_(torch.nan)
            self.scales.view(LAYERS, -1)[:, groups] = self.scale_contents.view(LAYERS, -1)[
                :, groups
            ]

    def cache(self, layer: int) -> LatentCache:
        """Return the cache of a layer."""
        scales = None if self.scales is None else self.scales[layer]
        return LatentCache(self.mla.config.cache_format, self.caches[layer], scales)

    def plan(self, view: StepView | Batch, num_tokens: int) -> None:
        """Describe the step."""
        lengths = (view.cu_seqlens_q, view.seq_lens, view.block_table)
        self.mla.plan(
            MlaStep(
                *lengths, num_tokens=num_tokens, max_query_len=self.max_query_len, mask=view.mask
            )
        )

    def layers(self, view: StepView | Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Append and attend in every layer; return out [L, T, H, R] and lse [L, T, H]."""
        q, kv = view.tokens["q"], view.tokens["kv"]
        tokens = len(q)
        for layer in range(LAYERS):
            cache = self.cache(layer)
            self.mla.append(kv[:, layer, :R], kv[:, layer, R:], cache)
            self.mla.attend(
                q[:, layer, :, :R],
                q[:, layer, :, R:],
                cache,
                out=self.outs[layer, :tokens],
                lse=self.lses[layer, :tokens],
            )
        return self.outs[:, :tokens], self.lses[:, :tokens]

    def eager(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run a step by itself; return copies of out, lse and the caches' bits."""
        self.restore(batch)
        self.outs.fill_(torch.nan)
        self.lses.fill_(torch.nan)
        self.plan(batch, batch.num_tokens)
        out, lse = self.layers(batch)
        return out.clone(), lse.clone(), bits(self.caches).clone()


def instance_of(family: str, config: MlaConfig, longest: int) -> PagedMla:
    """Return an instance whose kernel is of this family; skip where the device has none of it."""
    arch = device_facts(torch.device("cuda", 0)).arch
    if family != PORTABLE and arch != "sm90":
        pytest.skip(f"{arch} has no Gluon kernels")
    choose = portable_variant if family == PORTABLE else serving_variant
    variant = choose(demand_of(config, arch), longest)
    assert variant.family == family
    return PagedMla(config, variant=variant)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View as integers, so that NaN equals NaN."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def same(first: Any, second: Any) -> bool:
    """Return whether tensors are equal bit for bit."""
    return bool(torch.equal(bits(first.contiguous()), bits(second.contiguous())))
