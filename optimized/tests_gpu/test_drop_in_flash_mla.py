"""FlashMLA's names inside CUDA graphs and on several streams (S-17)."""

import pytest
import torch

from paged_mla_optimized.drop_in.flash_mla import flash_mla_with_kvcache, get_mla_metadata

ROWS, HEADS, R, WIDTH, PAGE, PAGES = 8, 128, 512, 576, 64, 16
LENGTHS = (1, 64, 65, 1024, 130, 7, 512, 1000), (1024, 1, 3, 66, 64, 900, 2, 511)


def layers(query_len):
    """Return queries and caches of two layers, and their block table."""
    generator = torch.Generator("cuda").manual_seed(query_len)
    draw = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    table = torch.randperm(ROWS * PAGES, generator=generator, device="cuda")
    queries = [torch.randn(ROWS, query_len, HEADS, WIDTH, **draw) for _ in range(2)]
    caches = [torch.randn(ROWS * PAGES, PAGE, 1, WIDTH, **draw) for _ in range(2)]
    return queries, caches, table.int().view(ROWS, PAGES)


def step(queries, caches, table, lengths):
    """Attend in both layers with one plan; return the outputs and lse of both."""
    metadata, _ = get_mla_metadata()
    return [
        each
        for q, cache in zip(queries, caches, strict=True)
        for each in flash_mla_with_kvcache(q, cache, table, lengths, R, metadata, causal=True)
    ]


@pytest.mark.parametrize("query_len", [1, 2])
def test_a_graph_follows_the_lengths_that_it_is_given(query_len):
    """S-17: captured with new metadata, a replay plans the lengths of that moment."""
    made = layers(query_len)
    given = [torch.tensor(lengths, dtype=torch.int32, device="cuda") for lengths in LENGTHS]
    expected = [step(*made, lengths) for lengths in given]
    lengths = given[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = step(*made, lengths)
    for now, wanted in zip((*given, given[0]), (*expected, expected[0]), strict=True):
        lengths.copy_(now)
        graph.replay()
        for found, right in zip(answers, wanted, strict=True):
            assert torch.equal(found, right)


def test_streams_have_buffers_of_their_own():
    """S-17: steps that run at once on two streams have the outputs of steps run one by one."""
    made = layers(1)
    given = [torch.tensor(lengths, dtype=torch.int32, device="cuda") for lengths in LENGTHS]
    expected = [step(*made, lengths) for lengths in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in given]
    found = [[] for _ in given]
    for _ in range(20):
        for number, (stream, lengths) in enumerate(zip(streams, given, strict=True)):
            with torch.cuda.stream(stream):
                found[number].append(step(*made, lengths))
    torch.cuda.synchronize()
    for answers, wanted in zip(found, expected, strict=True):
        for answer in answers:
            for mine, right in zip(answer, wanted, strict=True):
                assert torch.equal(mine, right)
