"""transformers: ``kv_b_proj`` is read and never called; a change of its call is an error.

Each change is made before the creation of a pool, which then fails, and after it, and then the next
forward fails. Another file makes some changes with real libraries, if they are installed.
"""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from hf_models import IDS, TINY, Kind, build, forward, paged
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from paged_mla_optimized.engines.transformers import LatentPool, PagedMlaCache
from paged_mla_optimized.engines.transformers.attention import Latents, attend
from paged_mla_shared.errors import Unsupported

LINEAR = nn.Linear.forward


@pytest.fixture(name="model")
def _model():
    return build(Kind("v3", q_lora=True), TINY)


@pytest.fixture(name="ours")
def _ours(model):
    return paged(model, 4, num_blocks=6, max_rows=2)


class Linear(nn.Linear):
    """A subclass, which libraries of adapters call so too."""

    def forward(self, latents):
        return 2 * super().forward(latents)


class Wrapped(nn.Module):
    """A projection as libraries of adapters replace it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, latents):
        return 2 * self.base_layer(latents)


class Packed(nn.Module):
    """A projection whose weight is a method, as torch's dynamic quantization leaves it."""

    def weight(self):
        raise NotImplementedError


class Codes(torch.Tensor):
    """A weight in the form of quantization libraries: a subclass that reports a float dtype."""


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


CHANGES = {}


def change(expected):
    """Register a function that changes an attention, and a pattern of its error."""

    def keep(function):
        CHANGES[function.__name__] = (function, expected)
        return function

    return keep


def doubled(inner):
    return lambda *given: 2 * inner(*given)


def replace(attention, projection):
    attention.kv_b_proj = projection


def set_weight(attention, weight):
    attention.kv_b_proj.weight = nn.Parameter(weight, requires_grad=False)


@change("kv_b_proj is a Wrapped of test_hf_projection .*merge adapters")
def wrapper(attention, _patch):
    replace(attention, Wrapped(attention.kv_b_proj))


@change("kv_b_proj is a Sequential of torch.nn")
def sequence(attention, _patch):
    replace(attention, nn.Sequential(attention.kv_b_proj))


@change("kv_b_proj is a Packed of test_hf_projection")
def dynamic_quantization(attention, _patch):
    replace(attention, Packed())


@change("kv_b_proj is a Linear of test_hf_projection .*merge adapters")
def subclass(attention, _patch):
    attention.kv_b_proj.__class__ = Linear


@change("kv_b_proj is a ParametrizedLinear of torch.nn.utils.parametrize")
def parametrization(attention, _patch):
    parametrize.register_parametrization(attention.kv_b_proj, "weight", Twice())


@change("kv_b_proj is a ParametrizedLinear")
def norm_of_weights(attention, _patch):
    parametrizations.weight_norm(attention.kv_b_proj)


@change("kv_b_proj has hooks .*remove them")
def pruning(attention, _patch):
    prune.l1_unstructured(attention.kv_b_proj, "weight", 0.5)


@change("kv_b_proj is a OptimizedModule|kv_b_proj has a _compiled_call_impl of its own")
def compilation(attention, _patch):
    attention.kv_b_proj.compile(backend="eager")


@change("kv_b_proj has a forward of its own")
def forward_of_the_instance(attention, _patch):
    attention.kv_b_proj.forward = doubled(attention.kv_b_proj.forward)


@change("kv_b_proj has a forward of its own")
def method_of_the_instance(attention, _patch):
    projection = attention.kv_b_proj
    projection.forward = MethodType(lambda self, x: 2 * LINEAR(self, x), projection)


@change("kv_b_proj has a forward of its own")
def forward_of_another_instance(attention, _patch):
    attention.kv_b_proj.forward = copy.deepcopy(attention.kv_b_proj).forward


@change("kv_b_proj has a _call_impl of its own")
def call_of_the_instance(attention, _patch):
    attention.kv_b_proj._call_impl = doubled(attention.kv_b_proj._call_impl)


@change("kv_b_proj has a hook of accelerate")
def hook_of_accelerate(attention, _patch):
    """As ``add_hook_to_module`` leaves a module."""
    projection = attention.kv_b_proj
    projection._hf_hook, projection._old_forward = object(), projection.forward
    projection.forward = partial(lambda module, x: 2 * module._old_forward(x), projection)


@change("kv_b_proj has hooks")
def hook(attention, _patch):
    attention.kv_b_proj.register_forward_hook(lambda _, __, out: 2 * out)


@change("kv_b_proj has hooks")
def pre_hook(attention, _patch):
    attention.kv_b_proj.register_forward_pre_hook(lambda _, given: (2 * given[0],))


def of_kv_b_proj(module):
    return getattr(module, "out_features", 0) == 4 * (TINY.nope + TINY.value)


@change("kv_b_proj has hooks that are registered for all modules")
def global_hook(_attention, patch):
    hooks = nn.modules.module._global_forward_hooks
    patch.setitem(hooks, 0, lambda module, _, out: 2 * out if of_kv_b_proj(module) else None)


@change("kv_b_proj has hooks that are registered for all modules")
def global_pre_hook(_attention, patch):
    hooks = nn.modules.module._global_forward_pre_hooks
    patch.setitem(hooks, 0, lambda module, given: (2 * given[0],) if of_kv_b_proj(module) else None)


@change(r"kv_b_proj runs another nn\.Linear\.forward")
def forward_of_the_class(_attention, patch):
    patch.setattr(nn.Linear, "forward", doubled(LINEAR))


@change(r"kv_b_proj runs another nn\.Linear\.forward, nn\.Module\.__call__")
def call_of_the_class(_attention, patch):
    patch.setattr(nn.Linear, "__call__", lambda self, x: self.forward(x), raising=False)


@change(r"kv_b_proj runs another nn\.Linear\.forward, nn\.Module\.__call__")
def call_of_all_classes(_attention, patch):
    """What ``__call__`` calls in turn."""
    call = nn.Module._call_impl
    twice = doubled(call)

    def call_or_double(self, *given, **named):
        return twice(self, *given) if of_kv_b_proj(self) else call(self, *given, **named)

    patch.setattr(nn.Module, "_call_impl", call_or_double)


@change(r"kv_b_proj runs another nn\.Linear\.forward, nn\.Module\.__call__")
def inner_call_of_the_class(_attention, patch):
    patch.setattr(nn.Linear, "_call_impl", doubled(nn.Linear._call_impl), raising=False)


@change(r"kv_b_proj runs another nn\.Linear\.forward, nn\.Module\.__call__")
def compiled_call_of_the_class(_attention, patch):
    patch.setattr(nn.Linear, "_compiled_call_impl", doubled(LINEAR), raising=False)


@change(r"kv_b_proj runs another .*nn\.functional\.linear")
def product_of_torch(_attention, patch):
    patch.setattr(nn.functional, "linear", doubled(nn.functional.linear))


@change("kv_b_proj has a bias")
def bias(attention, _patch):
    rank, lines = attention.kv_b_proj.in_features, attention.kv_b_proj.out_features
    replace(attention, nn.Linear(rank, lines))


@change("kv_b_proj has a weight that is a Codes of test_hf_projection")
def weight_of_codes(attention, _patch):
    set_weight(attention, attention.kv_b_proj.weight.detach().as_subclass(Codes))


@change("kv_b_proj has a weight that is a NoneType")
def no_weight(attention, _patch):
    del attention.kv_b_proj.weight


@change("kv_b_proj has a weight on the meta device .*without offloading")
def offloaded_weight(attention, _patch):
    set_weight(attention, attention.kv_b_proj.weight.detach().to("meta"))


@change("kv_b_proj has a weight of layout torch.sparse_coo")
def sparse_weight(attention, _patch):
    set_weight(attention, attention.kv_b_proj.weight.detach().to_sparse())


@change(r"kv_b_proj has a weight of dtype torch\.float8_e4m3fn")
def weight_of_8_bits(attention, _patch):
    set_weight(attention, attention.kv_b_proj.weight.detach().to(torch.float8_e4m3fn))


@change(r"kv_b_proj has a weight of dtype torch\.float64")
def weight_of_64_bits(attention, _patch):
    set_weight(attention, attention.kv_b_proj.weight.detach().double())


@change(r"kv_b_proj has a weight of shape \[64, 32\] .*\[128, 32\]")
def part_of_a_weight(attention, _patch):
    """Of some heads alone, as tensor parallelism leaves it."""
    set_weight(attention, attention.kv_b_proj.weight.detach()[:64])


@change(r"layer 1 has weights of torch\.float\d+ on cpu and layer 0 has weights of torch\.float\d+")
def another_dtype(attention, _patch):
    set_weight(attention, attention.kv_b_proj.weight.detach().half())


@change("expand_kv of a DeepseekV3Attention is not the library's own")
def expansion_of_the_instance(attention, _patch):
    attention.expand_kv = doubled(attention.expand_kv)


@change("expand_kv of a Expanding is not the library's own")
def expansion_of_a_subclass(attention, _patch):
    kind = type(attention)
    attention.__class__ = type("Expanding", (kind,), {"expand_kv": doubled})


@change(r"scaling=.* of layer \d+ is not supported by paged_mla .* share one softmax scale")
def scaling(attention, _patch):
    attention.scaling *= 2


@pytest.mark.parametrize(("spoil", "expected"), CHANGES.values(), ids=CHANGES)
def test_before_the_pool(model, monkeypatch, spoil, expected):
    spoil(model.model.layers[1].self_attn, monkeypatch)
    with pytest.raises(Unsupported, match=expected):
        LatentPool(model, 4)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("spoil", "expected"), CHANGES.values(), ids=CHANGES)
def test_behind_the_pool(ours, monkeypatch, spoil, expected, layer):
    """Nothing of the refused forward is left."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    spoil(model.model.layers[layer].self_attn, monkeypatch)
    with pytest.raises(Unsupported, match=expected):
        forward(model, IDS, cache)
    assert (cache.get_seq_length(), pool.num_free) == (0, 6)


@pytest.mark.parametrize("spoil", [forward_of_the_instance, hook, bias, no_weight])
def test_within_a_forward(ours, monkeypatch, spoil):
    """A hook of the attention may change its ``kv_b_proj`` where the first layer has attended."""
    model, pool = ours
    model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda attention, _: spoil(attention, monkeypatch)
    )
    with pytest.raises(Unsupported, match=r"kv_b_proj has .*\(layer 1\)"):
        forward(model, IDS, PagedMlaCache(pool))


def test_a_hook_that_was_removed_is_none(model):
    """Accelerate leaves the method of the class behind, as an attribute of the instance."""
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.forward = projection.forward
        projection.register_forward_hook(lambda _, __, out: 2 * out).remove()
    ours, pool = paged(model, 4)
    expected = forward(model, IDS, None, use_cache=False)
    found = forward(ours, IDS, PagedMlaCache(pool))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class OfFunctions(TorchFunctionMode):
    def __torch_function__(self, func, _types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class OfOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [OfFunctions, OfOperators])
def test_modes_of_torch(ours, mode):
    """What they count, or change, of the product is lost where it is not run."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    with mode(), pytest.raises(Unsupported, match=r"runs under a mode of torch, Of\w+ of "):
        forward(model, IDS, cache)
    with torch.device("cpu"):  # a mode as well, which new tensors alone obey
        forward(model, IDS, cache)


SIBLINGS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj")


@pytest.mark.parametrize("name", [*SIBLINGS, None])
def test_hooks_of_called_modules_have_their_effect(model, name):
    """Of all modules of an attention, ``kv_b_proj`` alone is passed by."""
    own = {known for known, _ in model.model.layers[0].self_attn.named_children()}
    assert own == {*SIBLINGS, "q_a_layernorm", "kv_b_proj"}
    for layer in model.model.layers:
        module = layer.self_attn if name is None else getattr(layer.self_attn, name)
        outer = (lambda _, __, out: (1.5 * out[0], None)) if name is None else None
        module.register_forward_hook(outer or (lambda _, __, out: 1.5 * out))
    ours, pool = paged(model, 4)
    expected = forward(model, IDS, None, use_cache=False)
    found = forward(ours, IDS, PagedMlaCache(pool))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_values_that_a_module_changes_behind_its_cache(ours):
    """They are never read: a subclass that scales them would lose that."""
    model, pool = ours
    module, rows = model.model.layers[0].self_attn, PagedMlaCache(pool).rows
    query = torch.zeros(1, 4, 3, TINY.nope + TINY.rope)
    ckv, k_pe = (torch.zeros(1, 1, 3, width) for width in (TINY.latent, TINY.rope))
    with torch.no_grad(), pytest.raises(Unsupported, match="changes the values that its cache"):
        attend(module, query, Latents(rows, 0, ckv, k_pe), 2 * k_pe, None)


def test_another_scaling_than_the_modules(ours):
    model, pool = ours
    module, rows = model.model.layers[0].self_attn, PagedMlaCache(pool).rows
    query = torch.zeros(1, 4, 3, TINY.nope + TINY.rope)
    ckv, k_pe = (torch.zeros(1, 1, 3, width) for width in (TINY.latent, TINY.rope))
    with torch.no_grad(), pytest.raises(Unsupported, match=r"scaling=2\.0 is not supported"):
        attend(module, query, Latents(rows, 0, ckv, k_pe), k_pe, None, scaling=2.0)
