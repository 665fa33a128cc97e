"""transformers: what the adapter takes from the library is there, and nothing unheard of.

A release that fails here has a new interface to check; the other tests cover the existing one.
"""

import inspect

import pytest
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from paged_mla_optimized.engines.transformers import PagedMlaCache

ANSWERED = {"reset", "crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"}
BY_LAYERS = {  # what the library answers by asking the layers
    *("update", "get_seq_length", "get_max_length", "get_mask_sizes", "get_query_offset"),
    *("is_croppable", "is_compileable", "is_sliding", "is_linear", "is_initialized", "is_dummy"),
    *("activate_past_recording", "is_recording_past", "early_initialization", "batch_size"),
    *("get_max_cache_shape", "max_cache_len", "max_batch_size"),  # names of older releases
}
OFFLOADING = {"offload", "prefetch"}
OTHER_LAYERS = {  # of models without latents
    *("update_conv_state", "update_recurrent_state", "get_conv_state", "get_recurrent_state"),
    *("update_indexer", "has_previous_state"),
}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_the_cache_has_no_method_unheard_of():
    assert public(Cache) - BY_LAYERS - OFFLOADING - OTHER_LAYERS == ANSWERED
    assert public(PagedMlaCache) == ANSWERED


def test_the_library_uses_the_methods_of_layers():
    asked = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert CacheLayerMixin.__abstractmethods__ == asked


def test_the_implementation_is_known_by_its_name():
    assert "paged_mla" in AttentionInterface()
    assert "paged_mla" in AttentionMaskInterface()


@pytest.mark.parametrize("attention", [DeepseekV2Attention, DeepseekV3Attention])
def test_attention_expands_the_keys_of_the_cache(attention):
    assert [*inspect.signature(attention.expand_kv).parameters] == ["self", "kv_nope", "k_rot"]
    source = inspect.getsource(attention.forward)
    assert source.index(".update(") < source.index("self.expand_kv(")
