"""transformers: what libraries of adapters, offloading and quantization make of ``kv_b_proj``.

``test_hf_projection.py`` imitates them; here the libraries themselves change the model.
"""

import pytest
import torch
from ci.installed import import_or_skip
from hf_models import IDS, paged

from paged_mla_optimized.engines.transformers import LatentPool, PagedMlaCache
from paged_mla_shared.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore")  # of each other's deprecated names


def forward(model, cache=None, **options):
    with torch.no_grad():
        return model(IDS, past_key_values=cache, **options).logits


def assert_served(model):
    """Hold a model over a pool of its own against its eager attention."""
    ours, pool = paged(model, 4)
    expected = forward(model, use_cache=False)
    torch.testing.assert_close(forward(ours, PagedMlaCache(pool)), expected, rtol=1e-4, atol=1e-5)


def test_hooks_of_accelerate(model):
    """Refused as long as they are there."""
    hooks = import_or_skip("accelerate.hooks")
    projections = [layer.self_attn.kv_b_proj for layer in model.model.layers]
    for projection in projections:
        hooks.add_hook_to_module(projection, hooks.ModelHook())
    with pytest.raises(Unsupported, match="kv_b_proj has a hook of accelerate"):
        LatentPool(model, 4)
    for projection in projections:
        hooks.remove_hook_from_module(projection)
    assert_served(model)


def test_offloading_of_accelerate(model):
    """Weights come to the device while a module is called, which this one never is."""
    accelerate = import_or_skip("accelerate")
    ours, pool = paged(model, 4)
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    with pytest.raises(Unsupported, match=r"kv_b_proj has a hook of accelerate.*offloading"):
        forward(ours, PagedMlaCache(pool))


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_of_peft(model, options):
    """On ``kv_b_proj`` refused, by a class that is called Linear; served once they are merged."""
    peft = import_or_skip("peft")
    config = peft.LoraConfig(target_modules=["kv_b_proj"], init_lora_weights=False, **options)
    ours, pool = paged(model, 4)
    adapted = peft.get_peft_model(ours, config)
    with pytest.raises(Unsupported, match=r"kv_b_proj is a Linear of peft.*merge_and_unload"):
        forward(adapted, PagedMlaCache(pool))
    merged = adapted.merge_and_unload()
    found = forward(merged, PagedMlaCache(pool))
    merged.set_attn_implementation("eager")
    torch.testing.assert_close(found, forward(merged, use_cache=False), rtol=1e-4, atol=1e-5)


def test_an_adapter_of_a_parameter(model):
    """Since 0.17 peft adapts parameters by their names, too."""
    peft = import_or_skip("peft")
    config = peft.LoraConfig(target_modules=[], target_parameters=["kv_b_proj.weight"])
    with pytest.raises(Unsupported, match="kv_b_proj is a ParamWrapper of peft"):
        LatentPool(peft.get_peft_model(model, config), 4)


def test_adapters_elsewhere(model):
    peft = import_or_skip("peft")
    names = ["q_proj", "kv_a_proj_with_mqa", "o_proj"]
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False)
    assert_served(peft.get_peft_model(model, config))


@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_torchao(model, name):
    """They leave ``nn.Linear`` and a float dtype behind."""
    quantization = import_or_skip("torchao.quantization")
    quantization.quantize_(model.model, getattr(quantization, name)())
    with pytest.raises(Unsupported, match=r"kv_b_proj has a weight that is a \w+ of torchao"):
        LatentPool(model, 4)
