"""transformers: a model that a user compiles leaves attention out, and its outputs are equal."""

import pytest
import torch
from hf_models import IDS, TINY, Kind, build, paged

from paged_mla_optimized.engines.transformers import PagedMlaCache

KIND = Kind("v3")


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_compiled_model_generates_as_before():
    model = build(KIND, TINY)
    ours, pool = paged(model, 4)
    ours.forward = torch.compile(ours.forward, backend="eager")
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, **options)
    assert torch.equal(ours.generate(IDS, past_key_values=PagedMlaCache(pool), **options), expected)


def test_one_graph_for_all_is_refused():
    ours, pool = paged(build(KIND, TINY), 4)
    ours.forward = torch.compile(ours.forward, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="paged_mla is described on the host"):
        ours(IDS, past_key_values=PagedMlaCache(pool))
