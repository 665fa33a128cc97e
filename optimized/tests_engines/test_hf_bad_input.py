"""transformers: the adapter raises an error for everything that it does not support."""

import copy
import pickle

import pytest
import torch
from hf_models import IDS, TINY, Kind, build, forward, paged
from torch.autograd import forward_ad
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from paged_mla_optimized.engines.transformers import LatentPool, PagedMlaCache
from paged_mla_shared.errors import InvalidArgument, Unsupported

KIND = Kind("v3")


@pytest.fixture(name="ours")
def _ours(model):
    return paged(model, 4, num_blocks=6, max_rows=2, max_step_tokens=8, max_length=12)


def test_no_cache_and_other_caches(ours):
    model, _ = ours
    for cache in (None, DynamicCache(config=model.config), StaticCache(model.config, 16)):
        with pytest.raises(InvalidArgument, match="cache: got no cache, or a cache of transf"):
            forward(model, IDS, cache, use_cache=cache is not None)


GREEDY = {"attention_mask": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 2}


def test_an_assistant_of_this_implementation(model, ours):
    paged_model, pool = ours
    drafting, _ = paged(model, 4)
    with pytest.raises(Unsupported, match=r"an assistant model with .*set_attn_implementation"):
        paged_model.generate(
            IDS[:1], past_key_values=PagedMlaCache(pool), assistant_model=drafting, **GREEDY
        )


def test_an_early_exit(model, ours):
    """The error comes before the library removes layers from the model in order to draft.

    An early exit with another attention still works.
    """
    paged_model, pool = ours
    cache = PagedMlaCache(pool)
    with pytest.raises(Unsupported, match="assistant_early_exit is not supported by paged_mla"):
        paged_model.generate(IDS[:1], past_key_values=cache, assistant_early_exit=1, **GREEDY)
    assert paged_model.config.num_hidden_layers == 2
    expected = forward(model, IDS, None, use_cache=False)
    torch.testing.assert_close(forward(paged_model, IDS, cache), expected, rtol=1e-4, atol=1e-5)
    plain = model.generate(IDS[:1], **GREEDY)
    assert torch.equal(model.generate(IDS[:1], assistant_early_exit=1, **GREEDY), plain)


def test_another_attention_over_a_pool(ours):
    model, pool = ours
    model.set_attn_implementation("eager")
    with pytest.raises(InvalidArgument, match="attn_implementation: got eager"):
        forward(model, IDS, PagedMlaCache(pool))


def test_eager_attention_goes_on_working(model, ours):
    """A model with a pool still serves other caches, once its attention is the library's again."""
    other, _ = ours
    other.set_attn_implementation("eager")
    for use_cache in (False, True):
        expected = forward(model, IDS, None, use_cache=use_cache)
        assert torch.equal(forward(other, IDS, None, use_cache=use_cache), expected)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_is_not_copied(ours, way):
    """A copy would hand out blocks that the caches of the original use."""
    with pytest.raises(Unsupported, match=r"of a LatentPool, .*make another LatentPool with"):
        way(ours[1])


def test_a_cache_of_another_model(model, ours):
    _, pool = ours
    other, _ = paged(model, 4)
    with pytest.raises(InvalidArgument, match="cache: got layer 0 of another model"):
        forward(other, IDS, PagedMlaCache(pool))


@pytest.mark.parametrize("attention", ["eager", "sdpa", "paged_mla"])
def test_a_cache_for_a_model_without_a_pool(model, ours, attention):
    _, pool = ours
    other = copy.deepcopy(model)
    other.set_attn_implementation(attention)
    with pytest.raises(InvalidArgument, match="cache: got a cache of another model"):
        forward(other, IDS, PagedMlaCache(pool))


@pytest.mark.parametrize(
    ("ids", "argument"),
    [
        (torch.ones(3, 2, dtype=torch.long), "max_rows: got 3 rows"),
        (torch.ones(1, 9, dtype=torch.long), "max_step_tokens: got 9 tokens.*prefill_chunk_size"),
    ],
)
def test_steps_too_large(ours, ids, argument):
    model, pool = ours
    cache = PagedMlaCache(pool)
    with pytest.raises(InvalidArgument, match=argument):
        forward(model, ids, cache)
    assert (cache.get_seq_length(), pool.num_free) == (0, 6)
    forward(model, IDS, cache)  # what was refused left nothing behind


def test_a_batch_unlike_the_cached_one(ours):
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS, cache)
    with pytest.raises(InvalidArgument, match=r"cache: got a batch of 1; .*2 rows"):
        forward(model, IDS[:1], cache)


def test_no_free_blocks(ours):
    model, pool = ours
    cache = PagedMlaCache(pool)
    for _ in range(3):
        forward(model, IDS, cache)
    with pytest.raises(InvalidArgument, match="max_length: got a row of 13 tokens"):
        forward(model, IDS[:, :1], cache)
    with pytest.raises(InvalidArgument, match=r"num_blocks: got 6, of which 0 are free; .*2 free"):
        forward(model, IDS, PagedMlaCache(pool))
    cache.reset()
    forward(model, IDS, cache)
    assert pool.num_free == 4


def test_no_free_blocks_for_the_first_step(ours):
    """Nothing of it is left: the cache is as empty as before."""
    model, pool = ours
    other, cache = PagedMlaCache(pool), PagedMlaCache(pool)
    for _ in range(3):
        forward(model, IDS, other)
    with pytest.raises(InvalidArgument, match="num_blocks: got 6, of which 0 are free"):
        forward(model, IDS, cache)
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    del other
    forward(model, IDS, cache)
    assert pool.num_free == 4


def test_the_last_owner_of_a_block_keeps_it(model, ours):
    """Of rows that go on from one block all but one get a copy: no more room is needed."""
    paged_model, pool = ours
    others = [PagedMlaCache(pool) for _ in range(4)]
    for cache in others:
        forward(paged_model, IDS[:1], cache)
    cache, ids, following = PagedMlaCache(pool), IDS[:1, :3], torch.tensor([[1], [2]])
    forward(paged_model, ids, cache)
    cache.batch_repeat_interleave(2)
    assert pool.num_free == 1
    found = forward(paged_model, following, cache)
    assert pool.num_free == 0
    whole = torch.cat([ids.expand(2, -1), following], dim=1)
    expected = forward(model, whole, None, use_cache=False)
    torch.testing.assert_close(found[:, -1], expected[:, -1], rtol=1e-4, atol=1e-5)


def test_padding_that_changes(ours):
    model, pool = ours
    cache = PagedMlaCache(pool)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    forward(model, IDS, cache, attention_mask=mask)
    more = torch.ones(2, 1, dtype=torch.long)
    for wrong, given in (
        (torch.cat([torch.ones_like(mask), more], dim=1), "another padding"),
        (torch.cat([mask, more, more], dim=1), r"shape \[2, 6\]; allowed: \[2, 5\]"),
        (None, "None; allowed: the padding with which the columns were cached"),
    ):
        with pytest.raises(InvalidArgument, match=f"attention_mask: got {given}"):
            forward(model, IDS[:, :1], cache, attention_mask=wrong)
    forward(model, IDS[:, :1], cache, attention_mask=torch.cat([mask, more], dim=1))


def test_a_mask_that_is_written_to_between_steps(ours):
    """What was padding when it was cached has no latents."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    forward(model, IDS, cache, attention_mask=mask[:, :4])
    mask[0, 1] = True
    with pytest.raises(InvalidArgument, match="attention_mask: got another padding"):
        forward(model, IDS[:, :1], cache, attention_mask=mask)


def test_masks_of_other_kinds(ours):
    model, pool = ours
    whole = torch.zeros(2, 1, 4, 4)
    with pytest.raises(InvalidArgument, match=r"attention_mask: got shape \[2, 1, 4, 4\]"):
        forward(model, IDS, PagedMlaCache(pool), attention_mask=whole)


def test_layers_left_out(ours):
    """A forward that stopped half-way left layers of different lengths."""
    model, pool = ours
    cache, layers = PagedMlaCache(pool), model.model.layers
    model.model.layers = layers[:1]
    forward(model, IDS, cache)
    model.model.layers = layers
    with pytest.raises(InvalidArgument, match=r"ended after 1 of 2 layers; .* call reset\(\)"):
        forward(model, IDS, cache)
    cache.reset()
    forward(model, IDS, cache)


def test_a_configuration_of_fewer_layers(ours):
    """Some other part of the library may have left it so: its forwards leave layers out."""
    model, pool = ours
    model.config.num_hidden_layers = 1
    expected = r"model\.config\.num_hidden_layers: got 1; allowed: 2"
    with pytest.raises(InvalidArgument, match=expected):
        forward(model, IDS, PagedMlaCache(pool))
    assert pool.num_free == 6


def test_memory_that_ends_while_a_step_is_described(ours, monkeypatch):
    """Its tokens were never cached, so a further step would read uninitialized blocks."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS, cache)
    with monkeypatch.context() as patch:
        patch.setattr(pool.mla, "plan", out_of_memory)
        with pytest.raises(MemoryError):
            forward(model, IDS[:, :1], cache)
    with pytest.raises(InvalidArgument, match=r"ended after 0 of 2 layers; .* call reset\(\)"):
        forward(model, IDS[:, :1], cache)
    cache.reset()
    forward(model, IDS, cache)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["append", "attend"])
def test_memory_that_ends_in_a_layer(ours, monkeypatch, name, layer):
    """In the last layer too: a further step would read blocks that were never written."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS, cache)
    calls = iter([getattr(pool.mla, name)] * layer + [out_of_memory])

    def cut_off(*given):
        return next(calls)(*given)

    with monkeypatch.context() as patch:
        patch.setattr(pool.mla, name, cut_off)
        with pytest.raises(MemoryError):
            forward(model, IDS[:, :1], cache)
    with pytest.raises(InvalidArgument, match=rf"ended after {layer} of 2 .* call reset\(\)"):
        forward(model, IDS[:, :1], cache)
    cache.reset()
    forward(model, IDS, cache)


def test_memory_that_ends_while_blocks_are_copied(ours, monkeypatch):
    """The step has not started: its blocks are free again, and the cache still works."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS[:, :3], cache)
    twin = copy.deepcopy(cache)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "copy", out_of_memory)
        with pytest.raises(MemoryError):
            forward(model, IDS[:, 3:], twin)
    assert pool.num_free == 4
    assert torch.equal(forward(model, IDS[:, 3:], twin), forward(model, IDS[:, 3:], cache))


def out_of_memory(*_args, **_options):
    raise MemoryError


def test_gradients_dropout_weights(ours):
    model, pool = ours
    with pytest.raises(Unsupported, match="gradients"):
        model(IDS, past_key_values=PagedMlaCache(pool))
    model.train()
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(Unsupported, match="attention_dropout"):
        forward(model, IDS, PagedMlaCache(pool))
    model.eval()
    with pytest.raises(Unsupported, match="output_attentions"):
        forward(model, IDS, PagedMlaCache(pool), output_attentions=True)


def test_autocast_to_another_dtype():
    """The error names autocast, and the step leaves no trace."""
    model, pool = paged(build(Kind("v2"), TINY), 4)
    cache, expected = PagedMlaCache(pool), r"torch\.autocast, .* to torch\.bfloat16, is not supp"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(Unsupported, match=expected):
        forward(model, IDS, cache)
    assert (cache.get_seq_length(), pool.num_free) == (0, 64)
    forward(model, IDS, cache)


def forward_gradients(model, ids, cache):
    with forward_ad.dual_level():
        embeds = model.get_input_embeddings()(ids)
        dual = forward_ad.make_dual(embeds, torch.ones_like(embeds))
        model(inputs_embeds=dual, past_key_values=cache)


def product_with_a_jacobian(model, ids, cache):
    embeds = model.get_input_embeddings()(ids)
    torch.func.jvp(
        lambda given: model(inputs_embeds=given, past_key_values=cache).logits,
        (embeds,),
        (torch.ones_like(embeds),),
    )


def rows_one_by_one(model, ids, cache):
    torch.func.vmap(lambda row: model(row[None], past_key_values=cache).logits[0])(ids)


def trace(model, ids, cache):
    torch.jit.trace(lambda given: model(given, past_key_values=cache).logits, ids)


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of constants
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (forward_gradients, "forward-mode gradients"),
        (product_with_a_jacobian, r"transforms of torch\.func"),
        (rows_one_by_one, r"transforms of torch\.func"),
        (trace, r"torch\.jit\.trace"),
    ],
)
def test_transforms_of_torch(ours, way, expected):
    """Kernels would lose tangents, and a trace would return the first step's outputs."""
    model, pool = ours
    model.requires_grad_(requires_grad=False)
    cache = PagedMlaCache(pool)
    with torch.no_grad(), pytest.raises(Unsupported, match=expected):
        way(model, IDS, cache)
    assert (cache.get_seq_length(), pool.num_free) == (0, 6)


def with_padding(hidden, mask):
    return hidden, mask.index_fill(1, torch.tensor(1), value=False)


def without_padding(hidden, _mask):
    return hidden, None


def with_the_same_padding(hidden, mask):
    return hidden, mask.clone()


def with_fewer_tokens(hidden, mask):
    return hidden[:, 1:], mask


MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (with_padding, "attention_mask: got another padding in layer 1"),
        (without_padding, "attention_mask: got another padding in layer 1"),
        (with_the_same_padding, None),
        (with_fewer_tokens, r"query: got 2 rows of 3 tokens in layer 1; allowed: 2 rows of 4"),
    ],
)
def test_a_layer_of_other_tokens(model, ours, changed, expected):
    """The first layer plans for all; a hook may give a later one something else."""
    paged_model, pool = ours

    def change(_module, _given, named):
        hidden, mask = changed(named["hidden_states"], named["attention_mask"])
        rope = tuple(half[:, : hidden.shape[1]] for half in named["position_embeddings"])
        named |= {"hidden_states": hidden, "attention_mask": mask, "position_embeddings": rope}
        return (), named

    paged_model.model.layers[1].self_attn.register_forward_pre_hook(change, with_kwargs=True)
    if expected is None:
        found = forward(paged_model, IDS, PagedMlaCache(pool), attention_mask=MASK)
        right = forward(model, IDS, None, use_cache=False, attention_mask=MASK)
        is_token = MASK.bool()
        torch.testing.assert_close(found[is_token], right[is_token], rtol=1e-4, atol=1e-5)
        return
    with pytest.raises(InvalidArgument, match=expected):
        forward(paged_model, IDS, PagedMlaCache(pool), attention_mask=MASK)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sliding_window", "cu_seq_lens_q"])
def test_arguments_of_other_implementations(ours, name):
    """These arguments would have no effect: packed sequences would attend to each other."""
    model, pool = ours
    with pytest.raises(Unsupported, match=f"the attention argument {name} is not supported"):
        forward(model, IDS, PagedMlaCache(pool), **{name: torch.ones(2)})


@pytest.mark.parametrize("trained", ["kv_a_proj_with_mqa", "kv_b_proj"])
def test_gradients_that_no_query_carries(ours, trained):
    """Otherwise the gradients of keys and values would be missing without an error."""
    model, pool = ours
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    with pytest.raises(Unsupported, match="gradients"):
        model(IDS, past_key_values=PagedMlaCache(pool))


def test_a_model_of_another_dtype_than_its_pool(ours):
    """Nothing of the step is left: a model that is converted back goes on."""
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS, cache)
    expected = (
        r"model: got torch\.float16 on cpu; allowed: torch\.float32 on cpu, as at the creation"
    )
    with pytest.raises(InvalidArgument, match=expected):
        forward(model.half(), IDS, cache)
    assert (cache.get_seq_length(), pool.num_free) == (4, 4)
    forward(model.float(), IDS, cache)


def test_a_pool_that_was_made_in_inference_mode(model):
    """Blocks are copied outside of it too."""
    with torch.inference_mode():
        ours, pool = paged(model, 4)
    cache = PagedMlaCache(pool)
    forward(ours, IDS[:, :3], cache)
    twin = copy.deepcopy(cache)
    assert torch.equal(forward(ours, IDS[:, 3:], twin), forward(ours, IDS[:, 3:], cache))


def test_blocks_are_free_once_nothing_is_in_them(ours):
    model, pool = ours
    cache = PagedMlaCache(pool)
    for _ in range(3):
        forward(model, IDS, cache)
    left = []
    for columns in (0, 3, 1, 8):
        cache.crop(-columns)
        left.append((cache.get_seq_length(), pool.num_free))
    assert left == [(12, 0), (9, 0), (8, 2), (0, 6)]
    forward(model, IDS[:1], cache)  # an empty cache takes a batch of any size
    assert pool.num_free == 5


def test_cropping_by_a_length(ours):
    _, pool = ours
    with pytest.raises(InvalidArgument, match="tokens_to_remove: got 3; allowed: <= 0"):
        PagedMlaCache(pool).crop(3)


@pytest.mark.parametrize("row", [-1, 2])
def test_beams_that_do_not_exist(ours, row):
    model, pool = ours
    cache = PagedMlaCache(pool)
    forward(model, IDS, cache)
    with pytest.raises(InvalidArgument, match=f"beam_idx: got {row}; allowed: 0 to 1"):
        cache.reorder_cache(torch.tensor([0, row]))
    assert (len(cache.rows.blocks), pool.num_free) == (2, 4)


def test_choosing_rows_of_an_empty_cache(ours):
    """It is no error, as with the library's own caches."""
    model, pool = ours
    cache, rows = PagedMlaCache(pool), torch.tensor([1, 0])
    for choose in (cache.reorder_cache, cache.batch_select_indices):
        choose(rows)
    forward(model, IDS, cache)
    assert pool.num_free == 4


def test_no_pool_no_model_no_repeats(ours):
    _, pool = ours
    with pytest.raises(InvalidArgument, match="pool: got a str; allowed: a LatentPool"):
        PagedMlaCache("pool")
    with pytest.raises(InvalidArgument, match="model: got a str; allowed: a Module"):
        LatentPool("deepseek-ai/DeepSeek-V2-Lite", 4)
    for repeats in (0, -1, 1.5):
        with pytest.raises(InvalidArgument, match=f"repeats: got {repeats}"):
            PagedMlaCache(pool).batch_repeat_interleave(repeats)


def test_models_that_no_pool_is_for(model):
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=8,
        )
    )
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM .* no layer is a DeepseekV2Attent"):
        LatentPool(llama, 4)
    windowed = copy.deepcopy(model)
    windowed.config.sliding_window = 8
    with pytest.raises(Unsupported, match="sliding_window=8 is not supported"):
        LatentPool(windowed, 4)
    for size in (0, 4.0, True):
        with pytest.raises(InvalidArgument, match=f"num_blocks: got {size}"):
            LatentPool(model, size)
    for name in ("block_size", "max_rows", "max_step_tokens", "max_length"):
        for size in (0, 4.0, True):
            with pytest.raises(InvalidArgument, match=f"{name}: got {size}"):
                LatentPool(model, 4, **{name: size})
    with pytest.raises(Unsupported, match=r"Sequential is not supported .* in the order of layer"):
        LatentPool(
            torch.nn.Sequential(*[layer.self_attn for layer in reversed(model.model.layers)]), 4
        )
