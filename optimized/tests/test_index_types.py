"""Lengths and tables are int32 at every entrance; those of 64 bits are refused."""

from __future__ import annotations

import pytest
import torch
from mla_step import P, R, config

from paged_mla_optimized import (
    DraftSteps,
    ExtendWindow,
    LayerConfig,
    MlaLayer,
    PagedMla,
    Prefill,
    PrefillConfig,
    RequestMap,
    StepInputs,
)
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_shared.errors import InvalidArgument


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


STEP = {
    "cu_seqlens_q": int32(0, 1, 3),
    "seq_lens": int32(20, 33),
    "block_table": torch.arange(6, dtype=torch.int32).view(2, 3),
}
LENGTHS = {name: STEP[name] for name in ("cu_seqlens_q", "seq_lens")}
OF_TOKENS = {"num_tokens": 3}
PREFILL = {"cu_seqlens_q": int32(0, 3), "cu_seqlens_k": int32(0, 5)}
DRAFTS = {
    "prefix_lens": int32(3, 5),
    "prefix_table": int32(0, 1)[:, None],
    "branch_blocks": torch.arange(2, 6, dtype=torch.int32).view(2, 1, 2),
}


def layer():
    return MlaLayer(LayerConfig(attention=config(), qk_nope_head_dim=16, v_head_dim=16), "cpu")


def prefill():
    sizes = {"num_heads": 2, "softmax_scale": 0.1, "max_rows": 2, "max_tokens": 8}
    return Prefill(PrefillConfig(**sizes, dtype=torch.float32), "cpu")


def drafts():
    sizes = {"max_requests": 2, "branches": 1, "steps": 2, "prefix_width": 1, "own_width": 2}
    return DraftSteps(**sizes, block_size=16, device="cpu")


def inputs():
    tokens = {"q": ((64, 2, R + P), torch.float32)}
    return StepInputs(config(), "cpu", tokens)


def of_map(mla, **lengths):
    slots = lengths.pop("req_to_token")
    mla.plan(**lengths, block_table=RequestMap(slots, int32(0, 1)), num_tokens=3)


def copied(drafts, **tensors):
    drafts.copy_tails(torch.zeros(8, 16, R + P), **tensors)


@pytest.fixture
def ranks(tmp_path):
    """Return the one rank of a group."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield ContextParallelMla(config(), device="cpu")
    torch.distributed.destroy_process_group()


MAPPED = {**LENGTHS, "req_to_token": torch.arange(96, dtype=torch.int32).view(2, 48)}
ENTRANCES = {
    "PagedMla.plan": (lambda: PagedMla(config(), "cpu").plan, STEP, OF_TOKENS),
    "PagedMla.check": (
        lambda: PagedMla(config(), "cpu").check, STEP, {**OF_TOKENS, "num_blocks": 6},
    ),
    "PagedMla.explain": (lambda: PagedMla(config(), "cpu").explain, LENGTHS, OF_TOKENS),
    "PagedMla.plan of a map": (
        lambda: lambda **step: of_map(PagedMla(config(table_multiple=1), "cpu"), **step),
        MAPPED,
        {},
    ),
    "MlaLayer.plan": (lambda: layer().plan, STEP, OF_TOKENS),
    "MlaLayer.check": (lambda: layer().check, STEP, OF_TOKENS),
    "Prefill.plan": (lambda: prefill().plan, PREFILL, OF_TOKENS),
    "Prefill.check": (lambda: prefill().check, PREFILL, OF_TOKENS),
    "StepInputs.load": (lambda: inputs().load, STEP, {"q": torch.zeros(3, 2, R + P)}),
    "DraftSteps.fill": (lambda: drafts().fill, DRAFTS, {}),
    "DraftSteps.check": (lambda: drafts().check, DRAFTS, {}),
    "DraftSteps.copy_tails": (
        lambda: lambda **tensors: copied(drafts(), **tensors), DRAFTS, {},
    ),
    "ExtendWindow.fill": (
        lambda: ExtendWindow(2, 3, "cpu").fill, {"committed": int32(3, 5)}, {},
    ),
    "ExtendWindow.check": (
        lambda: ExtendWindow(2, 3, "cpu").check, {"committed": int32(3, 5)}, {},
    ),
}  # fmt: skip
CALLS = [(name, argument) for name, (_, tensors, _) in ENTRANCES.items() for argument in tensors]


@pytest.mark.parametrize(("entrance", "argument"), CALLS)
def test_integers_of_64_bits_are_refused(entrance, argument):
    """S-2, S-9: an engine that keeps its lengths as int64 hears of it before any launch."""
    call, tensors, numbers = ENTRANCES[entrance]
    wide = {**tensors, argument: tensors[argument].long()}
    with pytest.raises(
        InvalidArgument, match=f"^{argument}: got torch.int64; allowed: torch.int32"
    ):
        call()(**wide, **numbers)


@pytest.mark.parametrize("argument", STEP)
@pytest.mark.parametrize("call", ["plan", "check"])
def test_ranks_refuse_them(ranks, call, argument):
    """S-18: lengths and tables of whole rows."""
    wide = {**STEP, argument: STEP[argument].long()}
    with pytest.raises(
        InvalidArgument, match=f"^{argument}: got torch.int64; allowed: torch.int32"
    ):
        getattr(ranks, call)(**wide, num_tokens=3)


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_those_of_32_bits_are_taken(entrance):
    """The same calls, with nothing changed."""
    call, tensors, numbers = ENTRANCES[entrance]
    call()(**tensors, **numbers)
