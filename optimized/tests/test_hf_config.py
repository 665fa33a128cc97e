"""Configs of models: those that this project names, by values derived by hand, and bad ones.

Models of the transformers library are held against its own attention in ``tests_engines``.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paged_mla_optimized import LayerConfig, MlaConfig
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Rope, RopePairing, Yarn

CAPACITIES = {"block_size": 64, "max_rows": 8, "max_query_tokens": 64}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V3 = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "torch_dtype": "bfloat16",
}
"""The attention that DeepSeek-V3's own ``config.json`` describes."""
MSCALE = 0.1 * math.log(40) + 1


def made(**changes):
    fields = {name: value for name, value in (V3 | changes).items() if value != "missing"}
    return MlaConfig.from_hf(fields, **CAPACITIES)


def yarn(**changes):
    return {"rope_scaling": YARN | changes}


def test_deepseek_v3():
    """S-5, S-12: 192 ** -0.5 times the square of 0.1 ln 40 + 1, as DeepSeek publishes it."""
    rope = Rope(RopePairing.INTERLEAVED, 10000.0, Yarn(40.0, 4096))
    expected = MlaConfig(
        num_heads=128,
        softmax_scale=192**-0.5 * MSCALE**2,
        max_model_len=163840,
        rope=rope,
        **CAPACITIES,
    )
    found = made()
    assert found.softmax_scale == pytest.approx(0.1352337788608801)
    assert found == replace(expected, softmax_scale=found.softmax_scale)


def test_release_5_and_release_4_have_equal_configs():
    """Release 5 has one dict of rope parameters, and other names for type and dtype."""
    new = dict(V3)
    for name in ("rope_theta", "rope_scaling", "torch_dtype"):
        del new[name]
    parameters = {name: value for name, value in YARN.items() if name != "type"}
    new["rope_parameters"] = parameters | {"rope_type": "yarn", "rope_theta": 10000.0}
    for config in (new, new | {"dtype": torch.bfloat16}, json.loads(json.dumps(new))):
        assert MlaConfig.from_hf(config, **CAPACITIES) == made()
        assert MlaConfig.from_hf(SimpleNamespace(**config), **CAPACITIES) == made()


def test_a_model_without_yarn():
    """S-5: no mscale."""
    for changes in ({"rope_scaling": None}, {"rope_scaling": "missing"}):
        found = made(**changes)
        assert found.softmax_scale == 192**-0.5
        assert found.rope == Rope(RopePairing.INTERLEAVED, 10000.0)


def test_a_layer_has_the_widths_of_heads_too():
    """S-21: GLM-4.7-Flash has other widths than DeepSeek."""
    config = V3 | {"model_type": "glm4_moe_lite", "qk_nope_head_dim": 192, "v_head_dim": 256}
    layer = LayerConfig.from_hf(config, tensor_parallel_size=4, **CAPACITIES)
    attention = MlaConfig.from_hf(config, tensor_parallel_size=4, **CAPACITIES)
    assert (layer.qk_nope_head_dim, layer.v_head_dim) == (192, 256)
    assert layer.attention == attention
    assert attention.num_heads == 32
    assert attention.softmax_scale == pytest.approx(256**-0.5 * MSCALE**2)


def test_arguments_of_the_caller_come_first():
    given = {"max_model_len": 4096, "dtype": torch.float16}
    found = MlaConfig.from_hf(V3 | {"torch_dtype": "int8"}, **CAPACITIES, **given)
    assert (found.max_model_len, found.dtype, found.cache_format) == (4096, torch.float16, "fp16")
    assert MlaConfig.from_hf(V3 | {"torch_dtype": None}, **CAPACITIES).dtype is torch.bfloat16


def test_the_text_of_a_larger_model():
    """Kimi K2.5: the attention is that of ``text_config``."""
    outer = {"model_type": "kimi_k25", "dtype": "float16"}
    text = V3 | {"model_type": "kimi_k2", "torch_dtype": None}
    expected = replace(made(), dtype=torch.float16, cache_format=None)
    assert MlaConfig.from_hf(outer | {"text_config": text}, **CAPACITIES) == expected


@pytest.mark.parametrize(("beside", "length"), [(None, 4096), (2048, 2048)])
def test_the_trained_length_may_be_next_to_the_rope(beside, length):
    """S-12: as in transformers, the field of the config comes first."""
    assert made(original_max_position_embeddings=beside).rope.yarn.original_max_position == length


@pytest.mark.parametrize(
    ("changes", "pairing"),
    [
        ({"rope_interleave": False}, RopePairing.NEOX),
        ({"rope_interleave": False, "model_type": "deepseek_v2"}, RopePairing.INTERLEAVED),
        ({"model_type": "minicpm3"}, RopePairing.NEOX),
        ({"model_type": "missing"}, RopePairing.INTERLEAVED),
    ],
)
def test_pairs(changes, pairing):
    """S-12: DeepSeek-V2 and MiniCPM3 read no ``rope_interleave``."""
    assert made(**changes).rope.pairing is pairing


@pytest.mark.parametrize(
    ("changes", "magnitude", "of_scale"),
    [
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0, 0.707),  # DeepSeek-V2
        ({"mscale": 0.707, "mscale_all_dim": 0.0}, MSCALE, 0.0),
        ({"mscale": None, "mscale_all_dim": 1.0}, MSCALE, 1.0),
        ({"mscale_all_dim": 0.5}, MSCALE / (0.05 * math.log(40) + 1), 0.5),
        ({"attention_factor": 1.0, "mscale": 5.0}, 1.0, 1.0),
        ({"attention_factor": 1.25}, 1.25, 1.0),
        ({"attention_factor": 0.75}, 0.75, 1.0),
    ],
)
def test_magnitudes_of_yarn(changes, magnitude, of_scale):
    """S-5, S-12: of the rotation, and of the scale, which ``attention_factor`` leaves alone."""
    found = made(**yarn(**changes))
    ours = found.rope.yarn

    def of(mscale):
        return 0.1 * mscale * math.log(40) + 1

    assert of(ours.mscale) / of(ours.mscale_all_dim) == pytest.approx(magnitude)
    assert found.softmax_scale == pytest.approx(192**-0.5 * of(of_scale) ** 2)


INVALID = {
    "config.num_attention_heads": {"num_attention_heads": "missing"},
    "config.qk_nope_head_dim": {"qk_nope_head_dim": None},
    "config.v_head_dim": {"v_head_dim": 0},
    "config.qk_rope_head_dim": {"qk_rope_head_dim": "64"},
    "config.max_position_embeddings": {"max_position_embeddings": "missing"},
    "config.rope_theta": {"rope_theta": "missing"},
    "config.rope_scaling": {"rope_scaling": [40]},
    "config.rope_interleave": {"rope_interleave": None},
    "config.dtype": {"torch_dtype": "float8_e4m3fn"},
    "config.rope_scaling.type": yarn(type=None),
    "config.rope_scaling.factor": yarn(factor=None),
    "config.rope_scaling.original_max_position_embeddings": yarn(
        original_max_position_embeddings=None
    ),
    "config.rope_scaling.mscale": yarn(mscale="1"),
    "rope.yarn.factor": yarn(factor="40"),
    "rope.yarn.beta_fast": yarn(beta_fast=-0.5),
    "rope.yarn.mscale_all_dim": yarn(mscale=None, mscale_all_dim=-1),
    "config.model_type": {"model_type": ["deepseek_v3"]},
    "config.kv_lora_rank": {"kv_lora_rank": 10**400},
    "config.rope_scaling.rope_type": yarn(rope_type=["yarn"]),
    "config.rope_scaling.beta_fast": yarn(beta_fast="32"),
    "config.rope_scaling.beta_slow": yarn(beta_slow=np.ones(2)),
    "config.rope_scaling.mscale_all_dim": yarn(mscale_all_dim=10**400),
    "config.rope_scaling.attention_factor": yarn(attention_factor=math.nan),
    "num_heads": {"num_attention_heads": 256},
}


@pytest.mark.parametrize("argument", INVALID)
def test_a_wrong_field_is_named(argument):
    with pytest.raises(InvalidArgument) as error:
        made(**INVALID[argument])
    assert error.value.argument == argument


UNSUPPORTED = {
    "kv_lora_rank": {"kv_lora_rank": "missing", "model_type": "llama"},
    "model_type 'kimi_linear'": {"model_type": "kimi_linear"},
    "index_topk=2048": {"index_topk": 2048},
    "sliding_window=4096": {"sliding_window": 4096},
    "rope_scaling.full_attention": {"rope_scaling": {"full_attention": YARN}},
    "rope_parameters.full_attention": {
        "rope_scaling": None,
        "rope_parameters": {"full_attention": YARN | {"rope_theta": 10000}},
    },
    "rope_scaling.type='linear'": yarn(type="linear"),
    "rope_scaling.rope_type='llama3'": yarn(rope_type="llama3"),
    "rope_scaling.truncate=False": yarn(truncate=False),
    "rope_scaling.partial_rotary_factor=0.5": yarn(partial_rotary_factor=0.5),
    "config.partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5},
    "rope_scaling.attention_factor=2": yarn(attention_factor=2, factor=1),
}


@pytest.mark.parametrize("named", UNSUPPORTED)
def test_another_attention_is_refused(named):
    with pytest.raises(Unsupported, match=named):
        made(**UNSUPPORTED[named])


@pytest.mark.parametrize("config", [None, "deepseek-ai/DeepSeek-V3", Path("config.json")])
def test_what_is_no_config(config):
    """A name or a path is not looked up."""
    with pytest.raises(InvalidArgument, match=r"config: got .*; allowed: a config of the trans"):
        MlaConfig.from_hf(config, **CAPACITIES)


@pytest.mark.parametrize("length", [0, -1, "4096", 2**31])
def test_a_wrong_length_is_that_of_the_model(length):
    """`max_model_len` is the caller's."""
    with pytest.raises(InvalidArgument) as error:
        made(max_position_embeddings=length)
    assert error.value.argument == "config.max_position_embeddings"
    given = V3 | {"max_position_embeddings": length}
    assert MlaConfig.from_hf(given, max_model_len=64, **CAPACITIES).max_model_len == 64


@pytest.mark.parametrize("parameters", [{}, {"rope_theta": 5e5, "rope_type": "default"}])
def test_rope_scaling_counts_where_both_names_have_a_dict(parameters):
    """As in transformers 5.24: yarn that is added to a config of release 5 is not left out."""
    assert made(rope_parameters=parameters) == made()


@pytest.mark.parametrize("ranks", [0, 3, 256, -2, 1.0])
def test_heads_are_divided_evenly(ranks):
    with pytest.raises(InvalidArgument, match="tensor_parallel_size"):
        MlaConfig.from_hf(V3, tensor_parallel_size=ranks, **CAPACITIES)
