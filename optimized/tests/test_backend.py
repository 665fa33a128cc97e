import ml_dtypes
import numpy as np
import pytest
import torch

from paged_mla_optimized import backend
from paged_mla_optimized.runtime.arrays import to_numpy, to_torch
from paged_mla_shared.dims import SMALL
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem

CPU = torch.device("cpu")


def problem(**changes):
    defaults = {
        "dims": SMALL,
        "dtype": "float32",
        "cache_format": "fp32",
        "block_size": 4,
        "num_blocks": 6,
        "max_rows": 2,
        "max_query_tokens": 4,
        "max_model_len": 16,
        "softmax_scale": 0.2,
        "token_padding": 16,
        "block_padding": 64,
    }
    return Problem(**(defaults | changes))


def batch(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return Batch(
        cu_seqlens_q=np.array([0, 2], np.int32),
        seq_lens=np.array([6], np.int32),
        block_table=np.array([[5, 2]], np.int32),
        q_nope=normal(2, 4, 32),
        q_pe=normal(2, 4, 16),
        ckv=normal(2, 32),
        k_pe=normal(2, 16),
    )


def loaded():
    runner = backend.create().prepare(problem())
    layout = problem().layout
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((1, 4, 52)).astype(np.float32)  # 48 elements and 4 of padding
    block = np.zeros((1, layout.block_stride), np.uint8)
    block[:, : 4 * layout.token_stride] = rows.view(np.uint8).reshape(1, -1)
    poison = np.full(layout.token_stride // 4, np.nan, np.float32).view(np.uint8)[:16]
    image = CacheImage(layout, np.array([5]), block, poison)
    runner.load_cache(image)
    return runner, image


def test_cache_image_round_trip():
    """S-10: every byte, padding and poison included."""
    runner, image = loaded()
    ids = np.array([5, 0, 2])
    np.testing.assert_array_equal(runner.read_cache(ids), image.read(ids))


def test_an_unloaded_cache_is_zeros():
    """S-10: appending before any image was loaded writes into zeros."""
    runner = backend.create().prepare(problem())
    runner.append(batch())
    cache = runner.read_cache(np.arange(6))
    rows = problem().layout.field(cache, "ckv").reshape(24, 32)
    np.testing.assert_array_equal(rows[[8, 9]], batch().ckv)
    assert not rows[10:].any()


@pytest.mark.parametrize("first", ["plan", "append", "attend"])
def test_any_call_may_come_first(first):
    """S-17: whichever call sees a batch first plans it."""
    runner, _ = loaded()
    getattr(runner, first)(batch(3))
    runner.append(batch(4))
    step = batch(4)
    assert np.isfinite(runner.attend(step).out).all()
    assert runner.plan(step).slot_mapping.tolist() == [8, 9]


def test_refused_batches_write_nothing():
    """S-10: the values are looked at before the first launch."""
    runner, image = loaded()
    step = batch()
    step.block_table[0, 1] = 6
    with pytest.raises(InvalidArgument, match="block_table"):
        runner.append(step)
    np.testing.assert_array_equal(runner.read_cache(np.arange(6)), image.read(np.arange(6)))


def test_the_interpreter_declares_no_bfloat16():
    """S-11: what it computes wrongly it does not claim."""
    created = backend.create()
    assert created.mode == "interpreter"
    assert created.capabilities.dtypes == {"float32", "float16"}
    with pytest.raises(Unsupported, match="bfloat16"):
        created.prepare(problem(dtype="bfloat16", cache_format="bf16"))


@pytest.mark.parametrize("name", ["token_padding", "block_padding"])
def test_rows_with_unaligned_scales_are_unsupported(name):
    """S-11: the rules allow any number of bytes after rows of codes, kernels load whole floats."""
    created = backend.create()
    created.prepare(problem(cache_format="fp8_e4m3", **{name: 2}))
    created.prepare(problem(cache_format="fp8_ds_mla", **{name: 4}))
    with pytest.raises(Unsupported, match=f"{name}=2"):
        created.prepare(problem(cache_format="fp8_ds_mla", **{name: 2}))


def test_needs_a_gpu_or_the_interpreter(monkeypatch):
    """With neither there is no backend, and the error names what is missing."""
    monkeypatch.setattr(backend, "is_interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="TRITON_INTERPRET"):
        backend.create()


def test_views_travel_with_their_gaps():
    """S-9: a strided array stays strided, and the memory between its elements is copied too."""
    wide = np.arange(24, dtype=np.int32).reshape(4, 6)
    tensor = to_torch("block_table", wide[1:3, :5:2], CPU)
    assert tensor.tolist() == [[6, 8, 10], [12, 14, 16]]
    assert tensor.stride() == (6, 2)
    assert tensor.as_strided((24,), (1,), 0).tolist() == list(range(24))


def test_the_callers_array_is_copied():
    """S-10: nothing written on the device reaches the caller."""
    array = np.zeros(3, np.float32)
    to_torch("ckv", array, CPU).fill_(1.0)
    assert array.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_the_callers_tensor_is_copied(dtype):
    tensor = torch.ones(2).to(dtype)
    to_numpy(tensor)[:] = 0
    assert (tensor.float() == 1).all()


def test_bfloat16_keeps_its_bits():
    """S-11: every bit pattern, NaN payloads included, both ways."""
    patterns = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    tensor = to_torch("ckv", patterns, CPU)
    assert tensor.dtype is torch.bfloat16
    np.testing.assert_array_equal(to_numpy(tensor).view(np.uint16), patterns.view(np.uint16))


def test_reversed_and_unknown_arrays():
    """S-9: negative strides are made dense; a dtype torch lacks is refused by name."""
    assert to_torch("ckv", np.arange(3.0)[::-1], CPU).tolist() == [2, 1, 0]
    with pytest.raises(InvalidArgument, match="ckv"):
        to_torch("ckv", np.zeros(3, np.complex64), CPU)


def test_memory_that_earlier_steps_left_is_given_back_before_it_is_counted(monkeypatch):
    """Workers share a device."""
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("given back"))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: calls.append("counted") or (5 << 30, 8 << 30)
    )
    assert backend.TritonBackend(mode="gpu", device="cuda").memory_bytes == 5 << 30
    assert calls == ["given back", "counted"]


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_a_scale_of_queries_is_a_float_of_any_kind(kind):
    """S-11: NumPy's own floats of 64 bits are Python's."""
    codes, scales = loaded()[0].quantize_queries(batch(), kind(0.25))
    assert (scales == 0.25).all()
    assert codes.shape == (2, 4, 48)
