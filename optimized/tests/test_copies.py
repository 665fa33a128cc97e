"""Copies are independent of the original, or refused: none shares its buffers and handles."""

import copy
import pickle

import pytest
import torch
from mla_step import P, R, build, config

from paged_mla_optimized import (
    Bucket,
    DraftSteps,
    ExtendWindow,
    GraphedStep,
    HeadWeights,
    LatentCache,
    LayerConfig,
    LayerEvents,
    MlaLayer,
    PagedMla,
    Prefill,
    PrefillConfig,
    RequestMap,
    StepInputs,
)
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_shared.errors import Unsupported

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


def prefill_config():
    dims = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    return PrefillConfig(
        num_heads=2, softmax_scale=0.1, max_rows=2, max_tokens=4, dtype=torch.float32, **dims
    )


OWNERS = {
    "PagedMla": lambda: PagedMla(config(), "cpu"),
    "MlaLayer": lambda: MlaLayer(
        LayerConfig(attention=config(), qk_nope_head_dim=16, v_head_dim=16), "cpu"
    ),
    "Prefill": lambda: Prefill(prefill_config(), "cpu"),
    # Made of a group of processes, a GPU or its events, which are not here.
    "ContextParallelMla": lambda: ContextParallelMla.__new__(ContextParallelMla),
    "GraphedStep": lambda: GraphedStep.__new__(GraphedStep),
    "LayerEvents": lambda: LayerEvents.__new__(LayerEvents),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(("name", "owner"), OWNERS.items(), ids=OWNERS.keys())
def test_owners_of_kernels_are_not_copied(name, owner, way):
    """S-17: neither is a model with such an object; the error states what to do."""
    with pytest.raises(Unsupported, match=f"of a {name}, .*; make another {name} with"):
        way({"model": [owner()]} if way is copy.deepcopy else owner())


def test_an_instance_goes_on_after_a_refused_copy():
    """S-17: nothing of the planned step is lost."""
    step = build((20, 3), (33, 1))
    mla = PagedMla(step.config, "cpu")
    before = step.attend(mla)
    with pytest.raises(Unsupported):
        copy.deepcopy(mla)
    after = mla.attend(step.q_nope, step.q_pe, step.cache)
    assert all(map(torch.equal, before, after))


def _inputs():
    tokens = {"slots": ((config().max_query_tokens,), torch.int64)}
    return StepInputs(config(), "cpu", tokens)


def _drafts():
    sizes = {"max_requests": 2, "branches": 2, "steps": 2, "prefix_width": 2, "own_width": 2}
    return DraftSteps(**sizes, block_size=4, device="cpu")


HOLDERS = {  # of tensors alone, and what each of them holds
    "StepInputs": (_inputs, lambda held: held.tensors),
    "StepView": (
        lambda: _inputs().view(Bucket(2, 1)),
        lambda held: [held.seq_lens, *held.tokens.values()],
    ),
    "DraftSteps": (_drafts, lambda held: [held.cu_seqlens_q, held.seq_lens, held.block_table]),
    "ExtendWindow": (
        lambda: ExtendWindow(2, 3, "cpu"),
        lambda held: [held.cu_seqlens_q, held.seq_lens],
    ),
    "HeadWeights": (
        lambda: HeadWeights(torch.zeros(2, 5, R), 3),
        lambda held: [held.w_uk, held.w_uv, held.kv_b_proj],
    ),
    "LatentCache": (
        lambda: LatentCache("fp32", torch.zeros(2, 16, R + P)),
        lambda held: [held.latents],
    ),
    "RequestMap": (
        lambda: RequestMap(torch.zeros(2, 3).int(), torch.zeros(1).int()),
        lambda held: [held.req_to_token, held.request_ids],
    ),
}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
@pytest.mark.parametrize(("made", "tensors"), HOLDERS.values(), ids=HOLDERS.keys())
def test_copies_of_what_holds_tensors_are_independent(made, tensors, way):
    """S-9: what is written to a copy is not in the original."""
    original = made()
    before = [tensor.clone() for tensor in tensors(original)]
    other = way(original)
    assert type(other) is type(original)
    for tensor in tensors(other):
        tensor.fill_(7)
    assert all(map(torch.equal, tensors(original), before))


def test_copied_weights_share_memory_among_themselves():
    """S-21: an update of a copy's W_UK is seen by the product that makes keys and values."""
    weights = copy.deepcopy(HeadWeights(torch.zeros(2, 5, R), 3))
    weights.w_uk.fill_(1)
    made = torch.empty(4, 10)
    weights.materialize(torch.ones(4, R), made)
    assert torch.equal(made.view(4, 2, 5)[..., :3], torch.full((4, 2, 3), float(R)))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@pytest.mark.parametrize("made", [config, prefill_config])
def test_configs_are_copied(made, way):
    """What another instance is made with."""
    assert way(made()) == made()
