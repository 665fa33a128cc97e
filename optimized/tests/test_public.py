"""Names that engines import, new caches, and the products around absorbed attention."""

import os
import subprocess
import sys

import pytest
import torch
from mla_step import P, R, config

import paged_mla_optimized
from paged_mla_optimized import HeadWeights, LayerConfig, MlaLayer, MlaStep, PagedMla, empty_cache
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_shared import errors, problem
from paged_mla_shared.errors import InvalidArgument


@pytest.mark.parametrize("name", paged_mla_optimized.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(paged_mla_optimized, name) is not None
    assert name in dir(paged_mla_optimized)


def test_shared_names_are_the_shared_ones():
    for name in ("Rope", "RopePairing", "Yarn"):
        assert getattr(paged_mla_optimized, name) is getattr(problem, name)
    for name in ("InvalidArgument", "Unsupported"):
        assert getattr(paged_mla_optimized, name) is getattr(errors, name)


def instances(group, **changes):
    cfg = config(**changes)
    layer = LayerConfig(attention=cfg, qk_nope_head_dim=16, v_head_dim=16)
    return PagedMla(cfg, "cpu"), MlaLayer(layer, "cpu"), ContextParallelMla(cfg, group, "cpu")


@pytest.mark.parametrize("name", ["fp32", "fp8_e4m3", "fp8_block_token", "fp8_block_group"])
def test_a_new_cache_is_one_that_the_instance_takes(name, group_of_one):
    """S-11: of the config's format, all zeros, on the instance's device."""
    for mla in instances(group_of_one, cache_format=name):
        found, expected = mla.new_cache(3), empty_cache(config(cache_format=name), 3, "cpu")
        assert found.format == name
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            if theirs is None:
                assert ours is None
            else:
                assert (ours.shape, ours.dtype, ours.device) == (
                    theirs.shape,
                    theirs.dtype,
                    mla.device,
                )
                assert torch.equal(ours.float(), theirs.float())
        lens = torch.tensor([0, 2], dtype=torch.int32)
        mla.plan(MlaStep(lens, lens[1:], torch.zeros(1, 1, dtype=torch.int32), num_tokens=2))
        mla.append(torch.ones(2, R), torch.ones(2, P), found)
        with pytest.raises(InvalidArgument, match="num_blocks"):
            mla.new_cache(-1)


def test_absorb_and_project_are_called_alike():
    """S-21: both return their result, or write it to `out`, for any strides."""
    weights = HeadWeights(torch.randn(5, 6 + 3, R), 6)
    queries, latents = torch.randn(4, 5, 6), torch.randn(4, 5, R)
    for call, given, by_head, width in (
        (weights.absorb, queries, weights.w_uk, R),
        (weights.project, latents, weights.w_uv.mT, 3),
    ):
        expected = torch.einsum("thn,hnm->thm", given, by_head)
        torch.testing.assert_close(call(given), expected)
        wide = torch.full((4, 5, width + 2), 7.0)
        out = wide[..., :width]
        assert call(given, out=out) is out
        torch.testing.assert_close(out, expected)
        assert (wide[..., width:] == 7).all()


@pytest.mark.parametrize("call", ["absorb", "project"])
def test_an_output_does_not_overlap_the_inputs(call):
    """S-21: torch would write to queries that it still reads."""
    weights = HeadWeights(torch.randn(5, 2 * R, R), R)
    x = torch.randn(4, 5, R)
    repeated = torch.zeros(1, 5, R).expand(4, 5, R)
    for out in (x, weights.w_uk[:4, :5] if call == "absorb" else weights.w_uv[:4, :5], repeated):
        with pytest.raises(InvalidArgument) as error:
            getattr(weights, call)(x, out=out)
        assert error.value.argument == "out"


@pytest.mark.parametrize("call", ["absorb", "project"])
@pytest.mark.parametrize("argument", ["out", "given"])
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_wrong_tensor_is_named(call, argument, change):
    """S-21: before anything is written; torch would resize `out` with a warning."""
    weights = HeadWeights(torch.randn(5, 6 + 3, R), 6)
    shapes = {"absorb": (6, R), "project": (R, 3)}[call]
    given, out = (torch.zeros(4, 5, width) for width in shapes)
    name = argument if argument == "out" else {"absorb": "q_nope", "project": "latents"}[call]
    tensors = {"given": given, "out": out}
    wrong = tensors[argument]
    tensors[argument] = wrong.half() if change == "dtype" else wrong[:, :4]
    with pytest.raises(InvalidArgument) as error:
        getattr(weights, call)(tensors["given"], out=tensors["out"])
    assert error.value.argument == name


WITHOUT_A_DEVICE = """
import torch
import torch.distributed as dist

import paged_mla
from paged_mla import LayerConfig, MlaConfig, PrefillConfig, Unsupported

dist.init_process_group("gloo", init_method="file://FOLDER/alone", rank=0, world_size=1)
attention = MlaConfig(
    num_heads=1, softmax_scale=1.0, kv_lora_rank=16, qk_rope_head_dim=16, dtype=torch.float32,
    cache_format="fp32", block_size=4, max_rows=1, max_query_tokens=1, max_model_len=4,
)
layer = LayerConfig(attention=attention, qk_nope_head_dim=16, v_head_dim=16, workspace_tokens=64)
prefill = PrefillConfig(
    num_heads=1, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, softmax_scale=1.0,
    dtype=torch.float32, max_rows=1, max_tokens=1,
)
drafts = dict(
    max_requests=1, branches=1, steps=1, prefix_width=1, own_width=1, block_size=4, device="cpu"
)
calls = {
    "ContextParallelMla": lambda: paged_mla.ContextParallelMla(attention, device="cpu"),
    "DraftSteps": lambda: paged_mla.DraftSteps(**drafts),
    "MlaLayer": lambda: paged_mla.MlaLayer(layer, "cpu"),
    "PagedMla": lambda: paged_mla.PagedMla(attention, "cpu"),
    "Prefill": lambda: paged_mla.Prefill(prefill, "cpu"),
    "merge_partials": lambda: paged_mla.merge_partials(
        torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1)
    ),
}
for name, call in calls.items():
    try:
        call()
    except Unsupported as error:
        print(name, error)
"""


def test_no_kernel_starts_on_a_cpu_without_the_interpreter(tmp_path):
    """Every class and function that launches kernels raises Unsupported."""
    code = WITHOUT_A_DEVICE.replace("FOLDER", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    named = ("ContextParallelMla", "DraftSteps", "MlaLayer", "PagedMla", "Prefill")
    message = "device cpu is not supported; use CUDA, or TRITON_INTERPRET=1 for a CPU"
    assert done.stdout.splitlines() == [f"{name} {message}" for name in (*named, "merge_partials")]
