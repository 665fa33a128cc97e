"""The layer on the device at DeepSeek-V3 dims: equal outputs for all divisions of steps (S-21)."""

import itertools
from functools import partial

import pytest
import torch

from paged_mla_optimized import HeadWeights, LatentCache, LayerConfig, MlaConfig, MlaLayer
from paged_mla_optimized.tensors.step import MlaStep

R, P, N, V, HEADS, BLOCK = 512, 64, 128, 128, 16, 64
LENGTH = 3000
ROOM = 2048  # so that a chunk's keys come in parts
SCALE = 192**-0.5
LIMIT = 1e-2  # relative: keys, values, weights and answers are rounded to bfloat16
FORMATS = ["bf16", "fp8_e4m3"]

int32 = partial(torch.tensor, dtype=torch.int32, device="cuda")


class Request:
    """One request's tokens, a cache that has room for them and NaN, and its layer's weights."""

    def __init__(self, name):
        generator = torch.Generator("cuda").manual_seed(3)

        def normal(*sizes, scale=1.0):
            tensor = torch.randn(sizes, generator=generator, device="cuda") * scale
            return tensor.bfloat16()

        self.name = name
        self.ckv, self.k_pe = normal(LENGTH, R), normal(LENGTH, P)
        self.q = normal(LENGTH, HEADS, N + P, scale=1.5)
        self.weights = HeadWeights(normal(HEADS, N + V, R, scale=R**-0.5), N)
        blocks = -(-LENGTH // BLOCK)
        self.table = torch.randperm(blocks, generator=generator, device="cuda").int()
        latents, scales = torch.full((blocks, BLOCK, R + P), torch.nan, device="cuda"), None
        if name == "fp8_e4m3":
            latents, scales = latents.to(torch.float8_e4m3fn), torch.tensor(0.013, device="cuda")
        else:
            latents = latents.bfloat16()
        self.cache = LatentCache(name, latents, scales)

    def layer(self, tokens=LENGTH, rows=1):
        attention = MlaConfig(
            num_heads=HEADS,
            softmax_scale=SCALE,
            block_size=BLOCK,
            max_rows=rows,
            max_query_tokens=tokens,
            max_model_len=LENGTH,
            cache_format=self.name,
        )
        return MlaLayer(LayerConfig(attention=attention, workspace_tokens=max(tokens, ROOM)))

    def plan(self, layer, rows, *, absorbed_rows=None, **host):
        """Plan rows (first, last) of the request's positions."""
        lens = [last - first for first, last in rows]
        step = MlaStep(
            int32([0, *itertools.accumulate(lens)]),
            int32([last for _, last in rows]),
            self.table.expand(len(rows), -1),
            num_tokens=sum(lens),
            **host,
        )
        layer.plan(step, absorbed_rows=absorbed_rows)

    def answer(self, layer, first, last, absorbed):
        """Append and attend to the tokens at these positions."""
        lens = {"query_lens": [last - first], "max_seq_lens": [last]}
        self.plan(layer, [(first, last)], **lens, absorbed_rows=absorbed)
        layer.append(self.ckv[first:last], self.k_pe[first:last], self.cache)
        return self.attend(layer, torch.arange(first, last))

    def attend(self, layer, positions):
        q = self.q[positions]
        return layer.attend(q[..., :N], q[..., N:], self.cache, self.weights)

    def append_all(self):
        layer = self.layer()
        self.plan(layer, [(0, LENGTH)])
        layer.append(self.ckv, self.k_pe, self.cache)

    def expected(self, positions):
        """Attend in float32 to what the cache holds, as far as any query sees."""
        end = int(positions.max()) + 1
        cached = self.cache.latents.float() * (1 if self.cache.scales is None else 0.013)
        tokens = cached[self.table.long()].flatten(0, 1)[:end]
        k_nope = torch.einsum("sr,hnr->hsn", tokens[:, :R], self.weights.w_uk.float())
        v = torch.einsum("sr,hvr->hsv", tokens[:, :R], self.weights.w_uv.float())
        q = self.q[positions].float()
        scores = torch.einsum("thn,hsn->hts", q[..., :N], k_nope)
        scores = SCALE * (scores + torch.einsum("thp,sp->hts", q[..., N:], tokens[:, R:]))
        seen = torch.arange(end)[None] <= positions[:, None]
        scores = scores.masked_fill(~seen.cuda(), -torch.inf)
        out = torch.einsum("hts,hsv->thv", scores.softmax(-1), v)
        return out, scores.logsumexp(-1).T

    def assert_right(self, answer, positions):
        out, lse = self.expected(positions)
        assert (answer[0] - out).norm() / out.norm() < LIMIT
        assert (answer[1] - lse).abs().max() < 2 * LIMIT


@pytest.mark.parametrize("name", FORMATS)
def test_one_piece_chunks_and_hits(name):
    """S-19, S-21: the outputs of a prompt in one piece, in chunks, and after a prefix."""
    whole, chunked = Request(name), Request(name)
    one_piece = whole.answer(whole.layer(), 0, LENGTH, 0)
    whole.assert_right(one_piece, torch.arange(LENGTH))
    layer = chunked.layer(1100)
    for first, last in ((0, 1100), (1100, 2200), (2200, LENGTH)):
        answer = chunked.answer(layer, first, last, 0)
        chunked.assert_right(answer, torch.arange(first, last))
    for new, absorbed in itertools.product((1, 7, 64, 1000), (0, 1, None)):
        answer = whole.answer(layer, LENGTH - new, LENGTH, absorbed)
        whole.assert_right(answer, torch.arange(LENGTH - new, LENGTH))


@pytest.mark.parametrize("name", FORMATS)
def test_a_mixed_step(name):
    """S-21: decode rows absorbed, a hit and a prompt materialized, in one call."""
    request = Request(name)
    request.append_all()
    rows = [(2999, 3000), (64, 65), (1000, 1001), (2000, 2300), (0, 500)]
    layer = request.layer(1100, rows=8)
    lens = {
        "query_lens": [last - first for first, last in rows],
        "max_seq_lens": [last for _, last in rows],
    }
    request.plan(layer, rows, **lens, absorbed_rows=3)
    positions = torch.cat([torch.arange(first, last) for first, last in rows])
    request.assert_right(request.attend(layer, positions), positions)


@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_decode_step(name):
    """S-17: a graph of plan, append and attend, replayed with other rows."""
    request = Request(name)
    request.append_all()
    layer = request.layer(4, rows=4)
    starts, lens = int32([0, 1, 2, 3, 4]), int32([5, 6, 7, 8])
    table = request.table.expand(4, -1)
    ckv, k_pe = request.ckv[4:8].clone(), request.k_pe[4:8].clone()
    q = request.q[4:8].clone()

    def step():
        layer.plan(MlaStep(starts, lens, table, num_tokens=4))
        layer.append(ckv, k_pe, request.cache)
        return layer.attend(q[..., :N], q[..., N:], request.cache, request.weights)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        answer = step()
    for positions in (torch.tensor([2999, 99, 1500, 1000]), torch.tensor([0, 63, 64, 2047])):
        lens.copy_(positions + 1)
        for fixed, tokens in ((ckv, request.ckv), (k_pe, request.k_pe), (q, request.q)):
            fixed.copy_(tokens[positions])
        graph.replay()
        request.assert_right(answer, positions)


def test_queries_of_any_strides():
    """S-9: heads before tokens, and views of wider lines, have the output of dense queries."""
    request = Request("bf16")
    request.append_all()
    first, last = LENGTH - 300, LENGTH
    layer = request.layer(300)
    lens = {"query_lens": [300], "max_seq_lens": [LENGTH]}
    q = request.q[first:last]
    wide = torch.full((300, HEADS, N + P + 5), torch.nan, dtype=q.dtype, device="cuda")
    wide[..., : N + P] = q
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    for absorbed, view in itertools.product((0, 1), (wide[..., : N + P], turned)):
        request.plan(layer, [(first, last)], **lens, absorbed_rows=absorbed)
        answer = layer.attend(view[..., :N], view[..., N:], request.cache, request.weights)
        request.assert_right(answer, torch.arange(first, last))


@pytest.mark.parametrize("absorbed", [0, 1])
def test_on_another_stream(absorbed):
    """S-21: every launch waits for what its stream wrote; on any other it would read NaN."""
    request = Request("bf16")
    layer = request.layer(300)
    request.answer(layer, 0, 300, absorbed)  # compiles
    request.append_all()
    held = request.cache.latents.clone()
    request.cache.latents.fill_(torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        request.cache.latents.copy_(held)
        answer = request.answer(layer, LENGTH - 300, LENGTH, absorbed)
    stream.synchronize()
    request.assert_right(answer, torch.arange(LENGTH - 300, LENGTH))
