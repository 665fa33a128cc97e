"""What is read from a config is what the library's own attention does with it."""

import dataclasses
import importlib

import pytest
import torch
from hf_models import TINY, YARN, Kind, build, paged
from transformers import CONFIG_MAPPING, AutoConfig, __version__

from paged_mla_optimized import LayerConfig, MlaConfig
from paged_mla_optimized.config.huggingface import _PAIRINGS
from paged_mla_optimized.operations.queries.rope_tables import rope_tables
from paged_mla_shared.problem import RopePairing

CAPACITIES = {"block_size": 16, "max_rows": 2, "max_query_tokens": 8}
BORROWED = {"kimi_k2": "deepseek_v3", "sarvam_mla": "deepseek_v3"}
"""Models of which the library has no attention: they run that of another."""
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 50000.0},
    "yarn": YARN | {"original_max_position_embeddings": 64},
    "one_mscale": YARN | {"original_max_position_embeddings": 64, "mscale_all_dim": 0.0},
    "factor_of_attention": YARN
    | {"original_max_position_embeddings": 64, "attention_factor": 1.25, "beta_fast": 4.0},
}
CASES = [(kind, "yarn", {}) for kind in _PAIRINGS]
CASES += [("deepseek_v3", rope, {}) for rope in ROPES if rope != "yarn"]
CASES += [("deepseek_v2", "plain", {}), ("deepseek_v3", "yarn", {"rope_interleave": False})]


def config_of(kind, rope, **changes):
    """Return the library's config of a small model, all heads of real proportions."""
    fields = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 48,
        "v_head_dim": 24,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
        "rope_parameters": dict(rope),
    }
    if kind == "longcat_flash":
        fields |= {"head_dim": 16}
    if kind == "mistral4":
        fields["rope_parameters"]["llama_4_scaling_beta"] = 0.1
    return AutoConfig.for_model(BORROWED.get(kind, kind), **(fields | changes))


def library_of(config):
    kind = config.model_type
    return importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def the_class(library, ending):
    (found,) = (
        value
        for name, value in vars(library).items()
        if name.endswith(ending) and value.__module__ == library.__name__
    )
    return found


def library_scores(config, q, k):
    """Return q . k of rotated queries and keys [1, H, T, P] at positions 0, 1, .."""
    library = library_of(config)
    turn = the_class(library, "RotaryEmbedding")(config)(q, torch.arange(q.shape[2])[None])
    if hasattr(library, "apply_rotary_emb"):  # DeepSeek-V2
        q, k = library.apply_rotary_emb(q, k, turn)
    elif "apply_rotary_pos_emb" not in vars(library) or getattr(config, "rope_interleave", False):
        q, k = library.apply_rotary_pos_emb_interleave(q, k, *turn)
    else:
        q, k = library.apply_rotary_pos_emb(q, k, *turn)
    return q @ k.mT


def our_scores(config, q, k):
    """Return the same as the kernels' tables and pairing have it."""
    cos, sin = rope_tables(config.rope, q.shape[-1], q.shape[2], torch.float32)
    is_neox = config.rope.pairing is RopePairing.NEOX

    def turned(x):
        x = x.double()
        first, second = x.chunk(2, -1) if is_neox else (x[..., 0::2], x[..., 1::2])
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    return turned(q) @ turned(k).mT


@pytest.mark.parametrize(("kind", "rope", "changes"), CASES)
def test_scale_and_rope_are_those_of_the_library(kind, rope, changes):
    """S-5, S-12: for every model that is known, in the names of this release and of release 4."""
    if BORROWED.get(kind, kind) not in CONFIG_MAPPING:
        pytest.skip(f"transformers {__version__} has no {kind}")
    theirs = config_of(kind, ROPES[rope], **changes)
    fields = theirs.to_dict() | {"model_type": kind}
    ours = MlaConfig.from_hf(fields, **CAPACITIES)
    if kind not in BORROWED:
        assert MlaConfig.from_hf(theirs, **CAPACITIES) == ours
    parameters = fields.pop("rope_parameters")
    old = {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    parameters["type"] = parameters.pop("rope_type")
    assert MlaConfig.from_hf(fields | old, **CAPACITIES) == ours

    attention = next(
        value
        for name, value in vars(library_of(theirs)).items()
        if name.endswith(("Attention", "MLA"))
    )(theirs, 0)
    assert ours.softmax_scale == attention.scaling
    q, k = torch.randn(2, 1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    expected = library_scores(theirs, q, k).double()
    torch.testing.assert_close(our_scores(ours, q, k), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["v2", "v3", "v3_neox"])
def test_a_pool_has_the_config_that_is_read(family):
    """S-5: but for the rope, since the library's modules rotate."""
    model = build(Kind(family=family, yarn=True, half=True), TINY)
    ours, pool = paged(model, 16)
    read = LayerConfig.from_hf(
        ours.config,
        block_size=16,
        max_rows=pool.config.max_rows,
        max_query_tokens=pool.config.max_query_tokens,
        dtype=model.dtype,
    )
    unrotated = dataclasses.replace(read.attention, rope=None)
    assert pool.mla.config == dataclasses.replace(read, attention=unrotated)
