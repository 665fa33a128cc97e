"""The declarations of cache formats (S-11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged_mla_shared.cases import GROUPS
from paged_mla_shared.dims import DEEPSEEK_V3, SMALL
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, check_format, format_of, types_id
from paged_mla_shared.layout import CacheLayout


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("bf16", 1152),
        ("fp16", 1152),
        ("fp32", 2304),
        ("fp8_e4m3", 576),
        ("fp8_ds_mla", 656),
        ("fp8_block_token", 576),
        ("fp8_block_group", 576),
    ],
)
def test_token_bytes_at_deepseek_dims(name: str, token_bytes: int):
    """S-11: a format states the bytes of a token."""
    assert FORMATS[name].token_bytes(DEEPSEEK_V3) == token_bytes


@pytest.mark.parametrize(
    ("name", "shape", "block_bytes"),
    [
        ("bf16", None, 64 * 1152),
        ("fp8_e4m3", (), 64 * 576),
        ("fp8_ds_mla", None, 64 * 656),
        ("fp8_block_token", (10, 1, 64), 64 * 576 + 4 * 64),
        ("fp8_block_group", (10, 1, 4), 64 * 576 + 4 * 4),
    ],
)
def test_scale_tensor_and_block_bytes(name: str, shape: tuple[int, ...], block_bytes: int):
    """S-11: separate scales have a declared shape and count as bytes of a block."""
    assert FORMATS[name].scale_shape(10, 64) == shape
    assert FORMATS[name].block_bytes(DEEPSEEK_V3, 64) == block_bytes


def test_ds_mla_row_is_512_fp8_then_4_scales_then_64_bf16():
    """S-11: the 656-byte row, byte by byte."""
    fields = FORMATS["fp8_ds_mla"].fields(DEEPSEEK_V3)
    assert [(f.name, f.offset, f.nbytes) for f in fields] == [
        ("ckv", 0, 512),
        ("ckv_scale", 512, 16),
        ("k_pe", 528, 128),
    ]


def test_strides_include_padding():
    """S-9: gaps between tokens and between blocks belong to the layout."""
    layout = CacheLayout(FORMATS["bf16"], DEEPSEEK_V3, 16, 3, token_padding=64, block_padding=128)
    assert layout.token_stride == 1152 + 64
    assert layout.block_stride == 16 * layout.token_stride + 128
    assert layout.storage_bytes == 3 * layout.block_stride


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("bf16", ("bfloat16", 576)),
        ("fp8_e4m3", ("float8_e4m3", 576)),
        ("fp8_ds_mla", ("uint8", 656)),
        ("fp8_block_group", ("float8_e4m3", 576)),
    ],
)
def test_row_of_a_cache_tensor(name: str, row: tuple[str, int]):
    """S-11: rows of one type have its elements; rows of several types are bytes."""
    assert FORMATS[name].row(DEEPSEEK_V3) == row


def test_ids_name_the_format_only_where_it_is_not_the_dtypes():
    """S-11: ids of plain formats are those of their dtype."""
    assert types_id("bfloat16", None) == "bf16"
    assert types_id("float16", "fp8_ds_mla") == "fp16-fp8_ds_mla"
    assert (format_of("float16", None), format_of("float16", "fp8_e4m3")) == ("fp16", "fp8_e4m3")


def test_no_case_of_the_table_names_a_format():
    """S-11: a run supplies the formats of all cases."""
    assert {case.cache_format for group in GROUPS.values() for case in group} == {None}
    [case] = [case for case in GROUPS["decode"] if case.name == "h9"]
    case = replace(case, cache_format="fp8_ds_mla", token_padding=8)
    problem = case.problem(SMALL, "bfloat16")
    assert (problem.dtype, problem.cache_format) == ("bfloat16", "fp8_ds_mla")
    assert problem.token_padding == 8  # bytes of e4m3
    assert case.dtype_id("bfloat16") == "decode-h9-bf16-fp8_ds_mla"


def test_an_unknown_format_raises():
    """S-11: the error names the argument."""
    check_format(None)
    with pytest.raises(InvalidArgument, match="cache_format: got 'int4'"):
        check_format("int4")
