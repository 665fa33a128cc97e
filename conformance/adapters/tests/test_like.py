"""Tests of known signatures with functions in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import known
import pytest

from paged_mla_adapters.judge.claims import Claims, Served
from paged_mla_adapters.judge.like import LIKE
from paged_mla_adapters.judge.probes import Probe, probe
from paged_mla_adapters.judge.probing import ANYTHING, beginnings, find
from paged_mla_adapters.judge.roles import roles_of
from paged_mla_adapters.judge.target import calls_of, load
from paged_mla_shared.cases.case import Row
from paged_mla_shared.errors import InvalidArgument

FILE = Path(known.__file__)
PAGE = Path(__file__).parents[2] / "docs" / "judge.md"
EMPTY = Row(0, 1)
FUNCTIONS = {
    "flash_attn_varlen_func": ("fa3", (Row(5, 1), Row(40, 3), EMPTY)),
    "flash_attn_with_kvcache": ("fa3", (Row(5, 1), Row(40, 3), EMPTY)),
    "mla_decode_fwd": ("aiter", (Row(5, 2), Row(40, 2), Row(0, 2))),
    "gqa_token_decode_attention_flash_decoding": ("lightllm", (Row(5, 1), Row(40, 1), EMPTY)),
    "run": ("flashinfer-bench", (Row(5, 1), Row(40, 1), EMPTY)),
    "flash_mla_with_kvcache_fp8": ("flash_mla-fp8", (Row(5, 2), Row(40, 2), Row(0, 2))),
}
BASES = {"flashinfer-bench": "base 2"}


def claims_of(name: str) -> Claims:
    like, target = FUNCTIONS[name][0], f"{FILE}:{name}"
    entry = LIKE[like]
    roles = {} if entry.bind else roles_of(calls_of(load(target)), "attend", {}, {})
    served = entry.served if entry.served.dtypes else replace(ANYTHING, dtypes=entry.dtypes)
    return Claims(target, like=like, profile=entry.profile, roles=roles, served=served)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_output_of_a_right_function_is_near_the_exact_output(name: str):
    """The rows have several query tokens if the signature supports them, or no keys."""
    claims, (like, rows) = claims_of(name), FUNCTIONS[name]
    case, dims, dtype = next(beginnings(claims))
    found = probe(claims, replace(case, rows=rows), dims, dtype)
    assert not found.why_not
    assert found.error < (0.06 if like == "flash_mla-fp8" else 0.01)
    if LIKE[like].has_lse:
        errors = found.lse_errors
        assert min(errors, key=errors.__getitem__) == BASES.get(like, "natural")
    else:
        assert found.lse_errors == {}


def test_known_values_are_not_probed():
    """Some signatures fix the cache formats, and others the data types."""
    keys = []

    def ask(key, *asked, **how):
        keys.append(key)
        return probe(*asked, **how)

    claims = claims_of("flash_mla_with_kvcache_fp8")
    found = find(claims, ask)
    assert found.served == claims.served
    assert found.served.cache_formats == ("fp8_e4m3",)
    assert len(keys) == 1
    unprobed = replace(claims_of("run"), served=Claims("").served)
    assert find(unprobed, lambda _key, *asked, **how: probe(*asked, **how)).served.dtypes == (
        "bfloat16",
    )


def test_products_are_not_probed():
    """SGLang's kernel rounds queries over 8-bit caches, which does not change its call."""
    claims = Claims("x:y", like="sglang-triton", served=LIKE["sglang-triton"].served)
    right = Probe(error=0.0, lse_errors={"natural": 0.0}, layouts=("[T, H]", "[T, H]"))
    served = find(claims, lambda *_, **__: right).served
    assert served.products == "fast"
    assert served.dtypes == LIKE["sglang-triton"].dtypes


def test_values_from_options_are_not_extended():
    """A kernel without checks would accept other values and write outside its memory."""
    asked = []
    right = Probe(error=0.0, lse_errors={"natural": 0.0}, layouts=("[T, H]", "[T, H]"))

    def ask(_key, _claims, case, dims, dtype, **_):
        asked.append((case.num_heads, dims.kv_lora_rank, dtype))
        return right

    said = Served(num_heads=(7,), head_dims=((512, 64),), dtypes=("bfloat16",))
    found = find(replace(claims_of("run"), served=said), ask).served
    assert set(asked) == {(7, 512, "bfloat16")}
    assert (found.num_heads, found.head_dims, found.dtypes) == (
        said.num_heads,
        said.head_dims,
        said.dtypes,
    )


def test_fa3_needs_a_parameter_for_the_latent_queries():
    with pytest.raises(InvalidArgument, match="q_v or qv"):
        LIKE["fa3"].bind(known.mla_decode_fwd)


def test_the_page_has_every_signature():
    page = PAGE.read_text()
    for name, like in LIKE.items():
        assert f"`{name}`" in page
        assert f"`{like.of.partition(':')[0]}" in page or like.bind is None
        assert f"`{like.profile}`" in page
