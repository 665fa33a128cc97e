import warnings
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from mla_step import config

from paged_mla_optimized import MlaConfig, PrefillConfig, SoftmaxScaleWarning
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Rope, RopePairing, Yarn

BAD = [
    ("softmax_scale", {"softmax_scale": float("nan")}),
    ("softmax_scale", {"softmax_scale": float("inf")}),
    ("softmax_scale", {"softmax_scale": 0.0}),
    ("softmax_scale", {"softmax_scale": 1e300}),
    ("softmax_scale", {"softmax_scale": 1e-300}),
    ("softmax_scale", {"softmax_scale": 10**400}),
    ("softmax_scale", {"softmax_scale": "0.1"}),
    ("softmax_scale", {"softmax_scale": torch.tensor(0.1)}),
    ("softmax_scale", {"softmax_scale": True}),
    ("num_heads", {"num_heads": 0}),
    ("block_size", {"block_size": 0}),
    ("num_heads", {"num_heads": 4.0}),
    ("num_heads", {"num_heads": None}),
    ("block_size", {"block_size": "16"}),
    ("kv_lora_rank", {"kv_lora_rank": 32.0}),
    ("table_fill", {"table_fill": -1.0}),
    ("table_fill", {"table_fill": 2**31}),
    ("table_fill", {"table_fill": -(2**40)}),
    ("batch_invariant", {"batch_invariant": "no"}),
    ("lse_base", {"lse_base": 2}),
    ("lse_base", {"lse_base": ["e"]}),
    ("reserved_slot", {"reserved_slot": 2**63}),
    ("reserved_slot", {"reserved_slot": 0.5}),
    ("max_rows", {"max_rows": 0}),
    ("max_rows", {"max_rows": True}),
    ("max_query_tokens", {"max_query_tokens": -1}),
    ("max_model_len", {"max_model_len": 0}),
    ("qk_rope_head_dim", {"qk_rope_head_dim": 15}),
    ("kv_lora_rank", {"kv_lora_rank": 0}),
    ("cache_format", {"cache_format": "int4"}),
    ("cache_format", {"cache_format": "bf16"}),
    ("cache_format", {"cache_format": ["fp32"]}),
    ("products", {"products": "approximate"}),
    ("block_size", {"cache_format": "fp8_block_group", "block_size": 6}),
    ("mask", {"mask": "tree"}),
    ("max_draft_tokens", {"max_draft_tokens": 4}),
    ("max_draft_tokens", {"mask": "tree:qlen"}),
    ("rope.theta", {"rope": Rope(RopePairing.NEOX, theta=0.0)}),
    ("rope.theta", {"rope": Rope(RopePairing.NEOX, theta=1.0, yarn=Yarn(40.0, 64))}),
    ("rope.yarn.factor", {"rope": Rope(RopePairing.NEOX, yarn=Yarn(1e-320, 64))}),
    ("rope.yarn.beta_fast", {"rope": Rope(RopePairing.NEOX, yarn=Yarn(40.0, 64, beta_fast=1e308))}),
    ("rope.yarn.beta_fast", {"rope": Rope(RopePairing.NEOX, yarn=Yarn(40.0, 64, beta_fast=0.5))}),
    ("rope.yarn.mscale", {"rope": Rope(RopePairing.NEOX, yarn=Yarn(40.0, 64, mscale=1e308))}),
    ("rope.pairing", {"rope": Rope("gptj")}),
    ("rope", {"rope": "neox"}),
    ("rope.yarn", {"rope": Rope(RopePairing.NEOX, yarn={"factor": 40.0})}),
]
UNKNOWN = [
    {"kv_lora_rank": 48},
    {"kv_lora_rank": 1024},
    {"qk_rope_head_dim": 8},
    {"dtype": torch.float64},
    {"dtype": ["float32"]},
]


@pytest.mark.parametrize(
    ("argument", "changes"), BAD, ids=["-".join(map(str, c.values()))[:40] for _, c in BAD]
)
def test_impossible_values_name_the_argument(argument, changes):
    """S-5, S-11: refused before anything is allocated."""
    with pytest.raises(InvalidArgument) as error:
        config(**changes)
    assert error.value.argument == argument


SCALES = {"numpy": np.float32(0.25), "ratio": Fraction(1, 4), "integer": 1}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_scale_is_kept_as_pythons_float(scale):
    """S-5: Triton refuses NumPy's float32, and compiles another kernel for an integer."""
    config_of_heads = PrefillConfig(num_heads=1, softmax_scale=scale, max_rows=1, max_tokens=1)
    for made in (config(softmax_scale=scale), config_of_heads):
        assert type(made.softmax_scale) is float
        assert made.softmax_scale == scale


@pytest.mark.parametrize("changes", UNKNOWN, ids=lambda c: str(next(iter(c.values()))))
def test_legal_but_unknown_values_are_unsupported(changes):
    """S-11: a legal problem these kernels do not know is not an invalid one."""
    with pytest.raises(Unsupported):
        config(**changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla", "fp8_block_token", "fp8_block_group"])
def test_fp8_is_no_matter_of_the_dtype(name, dtype):
    """S-11: each FP8 format allows queries, new latents and outputs of any dtype."""
    cfg = config(cache_format=name, dtype=dtype, kv_lora_rank=256)
    assert cfg.is_fp8
    assert cfg.stored is FORMATS[name]
    assert not config().is_fp8


REAL = {"num_heads": 16, "block_size": 64, "max_rows": 4, "max_query_tokens": 64}
REAL |= {"max_model_len": 1024}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")],
)
def test_without_a_format_a_cache_is_of_the_dtype(dtype, name):
    """S-11: by a name that reads as if it were given."""
    found = MlaConfig(softmax_scale=192**-0.5, dtype=dtype, **REAL)
    assert found == MlaConfig(softmax_scale=192**-0.5, dtype=dtype, cache_format=name, **REAL)
    assert found.cache_format == name
    assert replace(found, dtype=torch.float16, cache_format=None).cache_format == "fp16"


def test_another_dtype_does_not_change_a_format_that_is_there():
    """S-11: the error states how to change the format too."""
    found = MlaConfig(softmax_scale=192**-0.5, **REAL)
    with pytest.raises(
        InvalidArgument, match="cache_format: got bf16; allowed: fp16 \\(or None\\)"
    ):
        replace(found, dtype=torch.float16)


@pytest.mark.parametrize("scale", [576**-0.5, float(np.float32(576) ** np.float32(-0.5))])
def test_the_scale_of_a_cached_token_is_warned_of(scale):
    """S-5: a common mistake, once for each config, at the line that makes it."""
    with pytest.warns(SoftmaxScaleWarning, match=r"is \(kv_lora_rank \+ qk_rope") as told:
        MlaConfig(softmax_scale=scale, **REAL)
    assert [warning.filename for warning in told] == [__file__]


RIGHT = {
    "deepseek-v3": {"softmax_scale": 192**-0.5},
    "mistral-small-4": {"softmax_scale": 128**-0.5, "kv_lora_rank": 256},
    "glm-4.7-flash": {"softmax_scale": 256**-0.5},
    "minicpm3": {"softmax_scale": 96**-0.5, "kv_lora_rank": 256, "qk_rope_head_dim": 32},
    "heads as wide as latents": {"softmax_scale": 192**-0.5, "kv_lora_rank": 128},
    "small heads as wide as latents": {
        "softmax_scale": 32**-0.5,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
    },
}


@pytest.mark.parametrize("model", RIGHT)
def test_the_scales_of_models_are_not_warned_of(model):
    """S-5: with as few latents as a head has elements, both scales are the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MlaConfig(**REAL, **RIGHT[model])


def test_a_config_does_not_change():
    """S-17: buffers and kernels rely on it."""
    with pytest.raises(FrozenInstanceError):
        config().num_heads = 8
