"""transformers: a pool serves one forward at a time, in whichever thread; others are refused."""

import copy
import itertools
import threading
from contextlib import contextmanager

import pytest
import torch
from hf_models import TINY, Kind, build, paged

from paged_mla_optimized.engines.transformers import PagedMlaCache
from paged_mla_shared.errors import InvalidArgument

FIRST, SECOND = torch.tensor([[3, 4, 5, 6, 7]]), torch.tensor([[8, 9, 10]])
NEXT = torch.tensor([[11, 12]])
LONGEST_WAIT = 60.0


@pytest.fixture(name="model")
def _model():
    return build(Kind("v3"), TINY)


@pytest.fixture(name="ours")
def _ours(model):
    return paged(model, 4, num_blocks=16)


def forward(model, ids, cache):
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def assert_answers(model, found, *ids):
    """Hold logits of the last of `ids` against the library's own, of all of them in one piece."""
    whole = torch.cat(ids, dim=1)
    with torch.no_grad():
        expected = model(whole, use_cache=False).logits[:, -ids[-1].shape[1] :]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Other:
    """A forward in another thread, which waits where :meth:`pause` is called until it may go on."""

    def __init__(self, call, name="other"):
        self.answer, self.error = None, None
        self._reached, self._may_go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call,), name=name, daemon=True)

    def _run(self, call):
        try:
            self.answer = call()
        except BaseException as error:
            self.error = error  # with its traceback, and what the frames of that hold

    def pause(self):
        if threading.current_thread() is self._thread:
            self._reached.set()
            assert self._may_go_on.wait(LONGEST_WAIT)

    @contextmanager
    def paused(self):
        self._thread.start()
        assert self._reached.wait(LONGEST_WAIT), self.error
        yield
        self._may_go_on.set()
        self._thread.join()
        if self.error is not None:
            raise self.error


def before(owner, name, call, monkeypatch, at=0):
    """Let `call` come before the call number `at` of a method."""
    inner, numbers = getattr(owner, name), itertools.count()

    def method(*given, **named):
        if next(numbers) == at:
            call()
        return inner(*given, **named)

    monkeypatch.setattr(owner, name, method)


PLACES = {  # a method of the pool's kernels or of a layer, and which of its calls
    "planning": ("plan", 0),
    "first-append": ("append", 0),
    "first-attend": ("attend", 0),
    "between-layers": ("forward", 0),
    "last-append": ("append", 1),
    "last-attend": ("attend", 1),
}


def before_place(place, model, pool, call, monkeypatch):
    """Let `call` come at a place of a forward."""
    name, at = PLACES[place]
    owner = model.model.layers[0].mlp if name == "forward" else pool.mla
    before(owner, name, call, monkeypatch, at)


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_in_another_thread_is_refused(model, ours, monkeypatch, place):
    """Wherever the first one is: it goes on unharmed, and the refused cache is as it was.

    The cache lacks the tokens of the rejected forward, so it must be reset or cropped first.
    """
    paged_model, pool = ours
    caches = [PagedMlaCache(pool), PagedMlaCache(pool)]
    forward(paged_model, SECOND, caches[1])
    other = Other(lambda: forward(paged_model, FIRST, caches[0]), name="the first")
    before_place(place, paged_model, pool, other.pause, monkeypatch)
    with other.paused():
        taken, cached = pool.num_free, pool.latents.clone()
        with pytest.raises(InvalidArgument) as error:
            forward(paged_model, NEXT, caches[1])
        assert str(error.value) == (
            "cache: got a forward in thread 'MainThread' while a forward in thread "
            "'the first' is running; allowed: one forward at a time over a LatentPool"
        )
        assert (caches[1].get_seq_length(), pool.num_free) == (3, taken)
        torch.testing.assert_close(pool.latents, cached, rtol=0, atol=0, equal_nan=True)
    assert_answers(model, other.answer, FIRST)
    with pytest.raises(InvalidArgument, match=r"without the tokens .* crop\(0\)"):
        forward(paged_model, NEXT, caches[1])
    caches[1].crop(0)
    assert_answers(model, forward(paged_model, NEXT, caches[1]), SECOND, NEXT)
    assert_answers(model, forward(paged_model, NEXT, caches[0]), FIRST, NEXT)


def test_another_thread_may_start_after_the_last_attention(model, ours, monkeypatch):
    """What is left of a forward touches no pool."""
    paged_model, pool = ours
    caches = [PagedMlaCache(pool), PagedMlaCache(pool)]
    other = Other(lambda: forward(paged_model, FIRST, caches[0]))
    before(paged_model.model.layers[1].mlp, "forward", other.pause, monkeypatch)
    with other.paused():
        assert_answers(model, forward(paged_model, SECOND, caches[1]), SECOND)
    assert_answers(model, other.answer, FIRST)
    assert_answers(model, forward(paged_model, NEXT, caches[0]), FIRST, NEXT)


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_a_forward_that_raised_does_not_block_others(model, ours, monkeypatch, place, kind):
    """Its thread lives, and its cache and traceback are held: what counts is whether it runs."""
    paged_model, pool = ours
    cut_off, cache = PagedMlaCache(pool), PagedMlaCache(pool)

    def fail():
        raise kind

    def both():
        with monkeypatch.context() as patch:
            before_place(place, paged_model, pool, fail, patch)
            with pytest.raises(kind) as held:
                forward(paged_model, FIRST, cut_off)
        other.pause()
        return held

    other = Other(both)
    with other.paused():
        assert_answers(model, forward(paged_model, SECOND, cache), SECOND)
    assert_answers(model, forward(paged_model, NEXT, cache), SECOND, NEXT)
    cut_off.reset()
    assert_answers(model, forward(paged_model, FIRST, cut_off), FIRST)


def test_alternating_threads(model, ours):
    """Two caches, step by step, each in a thread of its own, then both in this one."""
    paged_model, pool = ours
    caches = [PagedMlaCache(pool), PagedMlaCache(pool)]
    steps = [(FIRST, SECOND), (SECOND, FIRST), (NEXT, NEXT)]
    for number in range(len(steps)):
        for cache, turn in zip(caches, (0, 1), strict=True):
            ids = [step[turn] for step in steps[: number + 1]]
            answers = []
            thread = threading.Thread(
                target=lambda ids=ids, cache=cache, answers=answers: answers.append(
                    forward(paged_model, ids[-1], cache)
                )
            )
            thread.start()
            thread.join()
            assert_answers(model, *answers, *ids)
    for cache, turn in zip(caches, (0, 1), strict=True):
        ids = [*(step[turn] for step in steps), NEXT]
        assert_answers(model, forward(paged_model, NEXT, cache), *ids)


def test_a_forward_inside_another_is_refused(model, ours, monkeypatch):
    """In one thread, as a hook might do it: the outer one goes on."""
    paged_model, pool = ours
    outer, inner = PagedMlaCache(pool), PagedMlaCache(pool)

    def nested():
        with pytest.raises(InvalidArgument, match="one forward at a time"):
            forward(paged_model, SECOND, inner)

    before(paged_model.model.layers[0].mlp, "forward", nested, monkeypatch)
    assert_answers(model, forward(paged_model, FIRST, outer), FIRST)
    inner.reset()
    assert_answers(model, forward(paged_model, SECOND, inner), SECOND)
    assert_answers(model, forward(paged_model, NEXT, outer), FIRST, NEXT)


CHANGES = {
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(-1),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_whose_forward_is_running_is_not_changed(model, ours, monkeypatch, change):
    """Its blocks would be free, or shared, while they are written; other caches may change."""
    paged_model, pool = ours
    caches = [PagedMlaCache(pool), PagedMlaCache(pool)]
    for cache in caches:
        forward(paged_model, FIRST, cache)
    other = Other(lambda: forward(paged_model, NEXT, caches[0]))
    before(paged_model.model.layers[0].mlp, "forward", other.pause, monkeypatch)
    with other.paused():
        with pytest.raises(InvalidArgument, match=r"changed or copied while .* 'other' is runn"):
            CHANGES[change](caches[0])
        CHANGES[change](caches[1])
    assert_answers(model, other.answer, FIRST, NEXT)
    CHANGES[change](caches[0])


def test_layers_that_are_called_one_by_one(model, ours):
    """Outside of a call of the model: a forward that comes between them is the one that goes on."""
    paged_model, pool = ours
    attentions = [layer.self_attn for layer in paged_model.model.layers]
    hidden = torch.randn(1, 3, TINY.hidden)
    rope = paged_model.model.rotary_emb(hidden, torch.arange(3)[None])
    caches = [PagedMlaCache(pool), PagedMlaCache(pool)]

    def attend(number):
        given = {"hidden_states": hidden, "position_embeddings": rope, "attention_mask": None}
        with torch.no_grad():
            attentions[number](**given, past_key_values=caches[0])

    attend(0)
    assert_answers(model, forward(paged_model, FIRST, caches[1]), FIRST)
    with pytest.raises(InvalidArgument, match="layer 1 out of order"):
        attend(1)
    caches[0].reset()
    attend(0)
    attend(1)
    assert caches[0].get_seq_length() == 3
