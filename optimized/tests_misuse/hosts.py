"""Illegal arguments on the host, which calls refuse with the argument's name before any launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import torch
from accesses import checked_accesses
from hypothesis import strategies as st
from machine import DEVICE, ON_GPU, as_bits

from paged_mla_optimized import (
    Bucket,
    DraftSteps,
    ExtendWindow,
    HeadWeights,
    LayerConfig,
    MlaConfig,
    MlaLayer,
    PagedMla,
    Prefill,
    PrefillConfig,
    RequestMap,
    StepInputs,
    merge_partials,
)
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument, Unsupported

I32 = torch.int32
R, P, N, V, H = 32, 16, 16, 32, 2
T, B, M, SIZE, BLOCKS = 6, 2, 4, 4, 8
DTYPE = torch.float16 if ON_GPU else torch.float32
FORMAT = "fp16" if ON_GPU else "fp32"

_SIZES: dict[str, Any] = {
    "num_heads": H,
    "softmax_scale": 0.2,
    "block_size": SIZE,
    "max_rows": 4,
    "max_query_tokens": 8,
    "max_model_len": 16,
    "kv_lora_rank": R,
    "qk_rope_head_dim": P,
    "dtype": DTYPE,
    "cache_format": FORMAT,
}
_PREFILL: dict[str, Any] = {
    "num_heads": H,
    "softmax_scale": 0.2,
    "max_rows": 4,
    "max_tokens": 8,
    "qk_nope_head_dim": N,
    "qk_rope_head_dim": P,
    "v_head_dim": V,
    "dtype": DTYPE,
}

_NUMBERS = {
    "negative": -1,
    "lowest": -(2**63),
    "past int64": 2**64,
    "a fraction": 0.5,
    "a whole float": 3.0,
    "not a number": float("nan"),
    "a flag": True,
    "text": "3",
    "nothing": None,
    "a NumPy flag": np.True_,
}
_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda _tensor: None,
    "a list": torch.Tensor.tolist,
    "another dtype": lambda tensor: tensor.to(torch.float64),
    "an axis more": lambda tensor: tensor[None],
    "an axis fewer": lambda tensor: tensor[0] if tensor.ndim else tensor[None],
    "on meta": lambda tensor: tensor.to("meta"),
    "a line fewer": lambda tensor: tensor[:-1],
    "a line more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "a column more": lambda tensor: torch.cat([tensor, tensor[..., :1]], dim=-1),
    "every other column": lambda tensor: tensor.repeat_interleave(2, dim=-1)[..., ::2],
    "one line for all": lambda tensor: tensor[:1].expand(tensor.shape),
}


@dataclass(frozen=True)
class Misfit:
    """One wrong argument of an otherwise right call."""

    call: str
    argument: str
    wrong: str


def _normal(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=DTYPE, device=DEVICE)


def _i32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=I32, device=DEVICE)


def _table() -> torch.Tensor:
    return torch.arange(B * M, dtype=I32, device=DEVICE).view(B, M)


def _step(**more: Any) -> dict[str, Any]:
    given = {"cu_seqlens_q": _i32(0, 2, 5), "seq_lens": _i32(9, 3), "block_table": _table()}
    return given | {"num_tokens": T} | more


def _planned(kind: str) -> Any:
    mla = _instances()[kind]
    mla.plan(MlaStep(**_step()))
    return mla


@cache
def _instances() -> dict[str, Any]:
    config = MlaConfig(**_SIZES)
    return {
        "mla": PagedMla(config, DEVICE),
        "map": PagedMla(MlaConfig(**_SIZES, table_multiple=2), DEVICE),
        "flat": PagedMla(MlaConfig(**_SIZES, mask="tree:qlen", max_draft_tokens=4), DEVICE),
        "packed": PagedMla(MlaConfig(**_SIZES, mask="tree:packed", max_draft_tokens=12), DEVICE),
        "layer": MlaLayer(
            LayerConfig(attention=config, qk_nope_head_dim=N, v_head_dim=V), DEVICE
        ),
        "prefill": Prefill(PrefillConfig(**_PREFILL), DEVICE),
        "drafts": DraftSteps(
            max_requests=B, branches=2, steps=2, prefix_width=M, own_width=2, block_size=SIZE,
            device=DEVICE,
        ),
        "window": ExtendWindow(B, 3, DEVICE),
        "inputs": StepInputs(config, DEVICE, {"ids": ((8,), torch.int64)}),
    }  # fmt: skip


def _cache() -> torch.Tensor:
    return _normal(BLOCKS, SIZE, R + P)


def _weights() -> HeadWeights:
    return HeadWeights(_normal(H, N + V, R), N)


def _attended(**more: Any) -> dict[str, Any]:
    given = {"q_nope": _normal(T, H, R), "q_pe": _normal(T, H, P), "cache": _cache()}
    lse = torch.zeros((T, H), dtype=torch.float32, device=DEVICE)
    return given | {"out": _normal(T, H, R), "lse": lse} | more


def _prefixes() -> dict[str, Any]:
    blocks = torch.arange(B * 4, dtype=I32, device=DEVICE).view(B, 2, 2)
    return {"prefix_lens": _i32(5, 0), "prefix_table": _table(), "branch_blocks": blocks}


def _of_fields(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that takes a step as a function of the step's fields."""
    names = {field.name for field in fields(MlaStep)}

    def called(**given: Any) -> Any:
        step = MlaStep(**{name: given.pop(name) for name in names & given.keys()})
        return call(step, **given)

    return called


def _mapped(req_to_token: Any, request_ids: Any, **rest: Any) -> None:
    table = RequestMap(req_to_token, request_ids)
    _instances()["map"].plan(MlaStep(block_table=table, **rest))


def _prefill_attend(**given: Any) -> None:
    prefill = _instances()["prefill"]
    prefill.plan(_i32(0, 2, 5), _i32(0, 4, 9), num_tokens=T)
    prefill.attend(**given)


def _calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return every call with right arguments."""
    of = _instances()
    ones = torch.ones(T, 2, dtype=torch.uint8, device=DEVICE)
    lines = {"ckv": _normal(9, R), "k_pe": _normal(9, P)}
    queries = {"q_nope": _normal(T, H, N), "q_pe": _normal(T, H, P)}
    keys = {"k_nope": _normal(9, H, N), "k_pe": _normal(9, P), "v": _normal(9, H, V)}
    partial = torch.zeros((2, T, H), dtype=torch.float32, device=DEVICE)
    token = {"ckv": _normal(T, R), "k_pe": _normal(T, P), "cache": _cache()}
    slots = torch.full((T,), -1, dtype=torch.int64, device=DEVICE)
    mapped = _step() | {"req_to_token": _i32(*range(48)).view(3, 16), "request_ids": _i32(0, 2)}
    del mapped["block_table"]
    flat = torch.ones(40, dtype=torch.bool, device=DEVICE)
    host = {"query_lens": [2, 3], "max_seq_lens": [9, 3], "absorbed_rows": 1}
    lse = torch.zeros((T, H), dtype=torch.float32, device=DEVICE)
    answer = {"out": _normal(T, H, V), "lse": lse}
    scale = torch.ones((), dtype=torch.float32, device=DEVICE)
    sums = {"cu_seqlens_q": _i32(0, 2, 5), "cu_seqlens_k": _i32(0, 4, 9), "num_tokens": T}
    return {
        "MlaConfig": (MlaConfig, dict(_SIZES)),
        "PrefillConfig": (PrefillConfig, dict(_PREFILL)),
        "Bucket": (Bucket, {"tokens": 4, "rows": 2, "max_query_len": 1}),
        "PagedMla.plan": (_of_fields(of["mla"].plan), _step(max_query_len=1)),
        "PagedMla.plan of a map": (_mapped, mapped),
        "PagedMla.plan of a tree": (_of_fields(of["flat"].plan), _step(mask=flat)),
        "PagedMla.plan of a packed tree": (_of_fields(of["packed"].plan), _step(mask=ones)),
        "PagedMla.append": (
            lambda **k: _planned("mla").append(**k),
            token | {"slot_mapping": slots},
        ),
        "PagedMla.attend": (lambda **k: _planned("mla").attend(**k), _attended()),
        "PagedMla.gather_context": (
            lambda **k: _planned("mla").gather_context(**k),
            {"cache": _cache()} | lines,
        ),
        "PagedMla.quantize_queries": (
            lambda **k: _planned("mla").quantize_queries(**k),
            {"q_nope": _normal(T, H, R), "q_pe": _normal(T, H, P), "scale": scale},
        ),
        "MlaLayer.plan": (_of_fields(of["layer"].plan), _step(**host)),
        "MlaLayer.attend": (
            lambda **k: _planned("layer").attend(**k),
            queries | answer | {"cache": _cache(), "weights": _weights()},
        ),
        "Prefill.plan": (of["prefill"].plan, sums),
        "Prefill.attend": (_prefill_attend, queries | keys | answer),
        "DraftSteps.fill": (of["drafts"].fill, _prefixes()),
        "DraftSteps.copy_tails": (of["drafts"].copy_tails, _prefixes() | {"cache": _cache()}),
        "ExtendWindow.fill": (of["window"].fill, {"committed": _i32(4, 0)}),
        "StepInputs.load": (
            lambda ids, **step: of["inputs"].load(MlaStep(**step), {"ids": ids}),
            _step() | {"ids": torch.zeros(T, dtype=torch.int64, device=DEVICE)},
        ),
        "merge_partials": (merge_partials, {"outs": partial[..., None], "lses": partial}),
    }


_CALLS_OF_PLANS = {"PagedMla.plan", "MlaLayer.plan", "Prefill.plan"}
"""The calls of :func:`_calls` that check the argument before they plan."""
_MAY = {  # values that are allowed
    "nothing": {
        "max_query_len", "slot_mapping", "scale", "out", "lse", "absorbed_rows", "ids",
    },
    "a line more": {
        "outs", "req_to_token", "mask", "num_keys", "ids", "cache", "k_nope",
    },
    "a line fewer": {"req_to_token", "mask", "ids", "cache", "outs"},
    "a column more": {
        "block_table", "req_to_token", "mask", "outs", "prefix_lens",
    },
    "every other column": {
        "cu_seqlens_q", "seq_lens", "block_table", "req_to_token", "request_ids", "mask", "lse",
        "slot_mapping", "cu_seqlens_k", "prefix_table", "committed", "outs", "lses", "ids", "scale",
    },
    "one line for all": {
        "cu_seqlens_q", "seq_lens", "block_table", "req_to_token", "request_ids", "mask", "q_nope",
        "q_pe", "ckv", "k_pe", "slot_mapping", "cu_seqlens_k", "prefix_table", "committed", "outs",
        "lses", "ids", "k_nope", "v", "scale", "cache",
    },
    "a whole float": {"softmax_scale"},
    "past int64": {"softmax_scale", "max_query_len", "tokens", "rows"},
    "a fraction": {"softmax_scale"},
}  # fmt: skip
_REFUSED = {  # not allowed, because they are written or must match another argument
    ("PagedMla.append", "cache", "one line for all"),
    ("PagedMla.gather_context", "ckv", "one line for all"),
    ("PagedMla.gather_context", "k_pe", "one line for all"),
    ("DraftSteps.copy_tails", "cache", "one line for all"),
    ("merge_partials", "lses", "a line more"),
    ("merge_partials", "outs", "a line fewer"),
    ("merge_partials", "outs", "a line more"),
    ("PagedMla.plan of a packed tree", "mask", "a line more"),
    ("PagedMla.plan of a packed tree", "mask", "a line fewer"),
    ("Prefill.attend", "k_nope", "a line more"),
    ("PagedMla.plan of a tree", "mask", "nothing"),
}


_TAKEN = {  # bytes of rows of any width and type are copied
    ("DraftSteps.copy_tails", "cache", "a column more"),
    ("DraftSteps.copy_tails", "cache", "another dtype"),
}


def _wrongs(call: str, argument: str, given: Any) -> list[str]:
    """Return the wrong values of an argument."""
    if isinstance(given, torch.Tensor):
        wrongs = [*_TENSORS]
        if given.ndim < 1:
            wrongs = ["nothing", "another dtype", "an axis fewer", "on meta"]
        elif given.ndim < 2:
            wrongs.remove("every other column")
            wrongs.remove("a column more")
    elif isinstance(given, (int, float)):
        wrongs = [*_NUMBERS]
    elif isinstance(given, list):
        wrongs = ["a text", "too few", "negative ones", "fractions", "too many", "huge ones"]
    else:
        wrongs = ["a number", "a text"]
    return [
        wrong
        for wrong in wrongs
        if (argument not in _MAY.get(wrong, ()) or (call, argument, wrong) in _REFUSED)
        and (call, argument, wrong) not in _TAKEN
        and (call, wrong) != ("StepInputs.load", "on meta")  # tensors of any device are copied
    ]


def _spoilt(given: Any, wrong: str) -> Any:
    if isinstance(given, torch.Tensor):
        return _TENSORS[wrong](given)
    if isinstance(given, (int, float)) and not isinstance(given, torch.dtype):
        return _NUMBERS[wrong]
    if isinstance(given, list):
        return {
            "a text": "23",
            "too few": given[:-1],
            "negative ones": [-n for n in given],
            "fractions": [n + 0.5 for n in given],
            "too many": [*given, 0],
            "huge ones": [2**70 for _ in given],
        }[wrong]
    return {"a number": 3, "a text": "text"}[wrong]


def _named(misfit: Misfit) -> str:
    return f"{misfit.argument} of {misfit.call}"


@cache
def all_misfits() -> tuple[Misfit, ...]:
    """Return every argument of every call with its wrong values."""
    return tuple(
        Misfit(call, argument, wrong)
        for call, (_, arguments) in _calls().items()
        for argument, given in arguments.items()
        for wrong in _wrongs(call, argument, given)
    )


READS = {"refused": dict.fromkeys(map(_named, all_misfits()), ("inconsistent",))}


def misfits(first: tuple[str, str]) -> st.SearchStrategy[Misfit]:
    """Draw a wrong argument."""
    return st.sampled_from([misfit for misfit in all_misfits() if _named(misfit) == first[0]])


def wrong_in(misfit: Misfit) -> set[tuple[str, str]]:
    """Return the argument."""
    return {(_named(misfit), "inconsistent")}


@cache
def _ask_right(call: str) -> None:
    """Make the right call once, which compiles its kernels."""
    asked, arguments = _calls()[call]
    asked(**arguments)


def hold(misfit: Misfit) -> None:
    """Make the right call, then the call with one wrong argument."""
    _ask_right(misfit.call)
    call, arguments = _calls()[misfit.call]
    wrong = arguments | {misfit.argument: _spoilt(arguments[misfit.argument], misfit.wrong)}
    tensors = [given for given in wrong.values() if isinstance(given, torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.device == DEVICE]
    before = [as_bits(tensor) for tensor in tensors]
    launched: list[str] = []
    try:
        if ON_GPU:
            call(**wrong)
        else:
            with checked_accesses() as launched:
                call(**wrong)
    except (InvalidArgument, Unsupported):
        pass
    else:
        raise AssertionError(f"{misfit.call} accepted {misfit.argument}: {misfit.wrong}")
    for tensor, bits in zip(tensors, before, strict=True):
        assert torch.equal(as_bits(tensor), bits), f"{misfit.call} wrote before it refused"
    plans = {"schedule_kernel", "token_kernel", "prefill_plan_kernel"}
    rest = [name for name in launched if misfit.call in _CALLS_OF_PLANS or name not in plans]
    assert not rest, f"{misfit.call} launched {rest} before it refused"


def forget() -> None:
    """Drop instances that a refused call may have left with an incomplete plan."""
    _instances.cache_clear()
