"""The device's own conversions of e4m3 are those that the tests hold, by their bits."""

import pytest
import torch
import triton
import triton.language as tl

from paged_mla_optimized.config.architectures import ROUNDING_E4M3_ONCE, WITH_E4M3
from paged_mla_optimized.kernels.common.e4m3 import decode, encode
from paged_mla_optimized.kernels.common.scales import quotient
from paged_mla_optimized.runtime.device import device_facts

CUDA = torch.device("cuda")


@triton.jit
def encode_kernel(x_ptr, codes_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(codes_ptr + at, encode(tl.load(x_ptr + at), NATIVE))


@triton.jit
def decode_kernel(codes_ptr, values_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.arange(0, N)
    values = decode(tl.load(codes_ptr + at), values_ptr.dtype.element_ty, NATIVE)
    tl.store(values_ptr + at, values)


@triton.jit
def quotient_kernel(
    x_ptr, scale_ptr, codes_ptr, N: tl.constexpr, NATIVE: tl.constexpr, BOUNDED: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    ratio = quotient(tl.load(x_ptr + at), tl.load(scale_ptr + at), NATIVE, BOUNDED)
    tl.store(codes_ptr + at, encode(ratio, NATIVE=True))


@pytest.fixture
def decodes():
    """Skip the test where kernels read codes with integers, as the device cannot convert them."""
    arch = device_facts(CUDA).arch
    if arch not in WITH_E4M3:
        pytest.skip(f"no kernel reads codes with conversions of {arch}")


@pytest.fixture
def encodes():
    """Skip the test where kernels make codes with integers: the device cannot, or rounds twice."""
    arch = device_facts(CUDA).arch
    if arch not in ROUNDING_E4M3_ONCE:
        pytest.skip(f"no kernel makes codes with conversions of {arch}")


@pytest.mark.usefixtures("encodes")
def test_codes_of_every_kind_of_number():
    """S-11: all exponents and ties, subnormal numbers, infinities, and NaN of any bits."""
    high = torch.arange(1 << 16, dtype=torch.int32, device=CUDA) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32, device=CUDA)
    x = (high[:, None] | low).view(torch.float32).flatten().contiguous()
    found = []
    for native in (False, True):
        codes = torch.zeros(len(x), dtype=torch.uint8, device=CUDA)
        encode_kernel[(len(x) // 1024,)](x, codes, 1024, native)
        found.append(codes)
    assert torch.equal(*found)


@pytest.mark.usefixtures("decodes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_of_every_code(dtype):
    """S-11: exact, both zeros too; NaN is NaN."""
    codes = torch.arange(256, dtype=torch.int32, device=CUDA).to(torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    for native in (False, True):
        values = torch.zeros(256, dtype=dtype, device=CUDA)
        decode_kernel[(1,)](codes, values, 256, native)
        assert torch.equal(values.isnan(), expected.isnan())
        assert torch.equal(values.nan_to_num(), expected.nan_to_num())
        assert torch.equal(values.signbit() & ~values.isnan(), expected.signbit() & ~values.isnan())


@pytest.mark.usefixtures("encodes")
@pytest.mark.parametrize("bounded", [False, True], ids=["any", "bounded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quotients_have_the_codes_of_divisions(dtype, bounded):
    """S-11: any number, with scales that put it between two codes, or any scale."""
    every = torch.arange(1 << 16, dtype=torch.int32, device=CUDA).to(torch.int16).view(dtype)
    values = torch.arange(127, dtype=torch.int32, device=CUDA).to(torch.uint8)
    values = values.view(torch.float8_e4m3fn).double()
    middles = (values[1:] + values[:-1]) / 2
    near = torch.arange(-3, 4, dtype=torch.int32, device=CUDA)
    for middle in middles:
        scale = (every.double().abs().nan_to_num(posinf=0.0) / middle).float()
        scale = scale.clamp(2.0**-126, torch.finfo(torch.float32).max)
        scale = (scale.view(torch.int32)[:, None] + near).clamp(1, 0x7F7FFFFF).view(torch.float32)
        if not bounded:
            other = torch.randint(1, 0x7F800000, (len(every), 1), dtype=torch.int32, device=CUDA)
            scale = torch.cat([scale, other.view(torch.float32)], dim=1).contiguous()
        x = every[:, None].expand_as(scale).contiguous()
        found = []
        for native in (False, True):
            codes = torch.zeros_like(x, dtype=torch.uint8)
            quotient_kernel[(x.numel() // 1024,)](x, scale, codes, 1024, native, bounded)
            found.append(codes)
        assert torch.equal(*found)
