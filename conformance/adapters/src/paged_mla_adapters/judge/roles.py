"""Roles of a function's parameters, which follow from one table of names that kernels use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from paged_mla_shared.errors import InvalidArgument

ALIASES: dict[str, tuple[str, ...]] = {
    "q": ("q", "query", "queries"),
    "q_nope": ("q_nope", "query_nope", "q_latent", "ql_nope", "q_absorbed"),
    "q_pe": ("q_pe", "query_pe", "q_rope", "query_rope"),
    "kv_cache": (
        "kv_cache",
        "cache",
        "k_cache",
        "key_cache",
        "k_buffer",
        "kv_buffer",
        "blocked_k",
        "paged_kv_cache",
        "latent_cache",
        "kv_c_and_k_pe_cache",
        "kv",
    ),
    "v_cache": ("v_buffer", "v_cache", "value_cache", "blocked_v"),
    "ckv_cache": ("ckv_cache", "kv_c_cache", "c_kv_cache", "kv_latent_cache", "kv_nope"),
    "kpe_cache": ("kpe_cache", "k_pe_cache", "k_rope_cache", "kv_rope"),
    "block_table": ("block_table", "block_tables", "page_table", "page_tables"),
    "req_to_token": ("req_to_token", "req_to_tokens", "req_to_token_indexs"),
    "request_ids": ("request_ids", "b_req_idx", "req_pool_indices", "req_indices"),
    "kv_indptr": ("kv_indptr", "kv_page_indptr", "cu_pages"),
    "kv_indices": ("kv_indices", "kv_page_indices", "page_indices"),
    "kv_last_page_len": ("kv_last_page_len", "kv_last_page_lens", "last_page_len"),
    "seq_lens": (
        "seq_lens",
        "seq_len",
        "seqlens",
        "cache_seqlens",
        "context_lens",
        "kv_lens",
        "kv_len_arr",
        "kv_seq_lens",
        "b_seq_len",
        "b_seqlen",
        "seqlens_k",
        "seqused_k",
        "lengths",
    ),
    "prefix_lens": (
        "prefix_lens",
        "prefix_len",
        "b_ready_cache_len",
        "b_prompt_cache_len",
        "num_computed_tokens",
    ),
    "cu_seqlens_q": (
        "cu_seqlens_q",
        "qo_indptr",
        "query_start_loc",
        "q_indptr",
        "cu_q_lens",
        "b_start_loc",
        "b_q_start_loc",
    ),
    "query_lens": ("query_lens", "q_lens", "q_seq_lens"),
    "max_query_len": ("max_query_len", "max_seqlen_q", "max_q_len", "max_input_len", "s_q"),
    "max_seq_len": (
        "max_seq_len",
        "max_seqlen_k",
        "max_seqlen_kv",
        "max_seqlen_pad",
        "max_kv_len",
        "max_context_len",
    ),
    "num_rows": ("num_rows", "num_seqs", "batch_size", "bs", "b"),
    "softmax_scale": ("softmax_scale", "sm_scale", "scale", "scaling"),
    "causal": ("causal", "is_causal"),
    "kv_lora_rank": ("kv_lora_rank", "head_dim_v", "head_dim_ckv", "dv", "rank"),
    "qk_rope_head_dim": ("qk_rope_head_dim", "head_dim_kpe", "rope_dim"),
    "head_dim": ("head_dim", "qk_head_dim", "head_size", "d"),
    "block_size": ("block_size", "page_size", "kv_block_size"),
    "num_heads": ("num_heads", "num_qo_heads", "num_q_heads", "h_q"),
    "num_kv_heads": ("num_kv_heads", "nhead_kv", "h_kv"),
    "k_scale": ("k_scale", "kv_scale", "cache_scale"),
    "v_scale": ("v_scale",),
    "k_descale": ("k_descale", "kv_descale", "descale_k"),
    "v_descale": ("v_descale", "descale_v"),
    "out": ("out", "o", "output", "att_out", "o_tensor"),
    "lse": ("lse", "out_lse", "lse_out", "softmax_lse", "output_lse"),
    "return_lse": ("return_lse", "return_softmax_lse"),
    "workspace": ("workspace", "workspace_buffer", "float_workspace_buffer"),
    "attn_logits": ("attn_logits",),
    "attn_lse": ("attn_lse",),
    "num_kv_splits": ("num_kv_splits",),
    "max_kv_splits": ("max_kv_splits",),
    "device": ("device",),
    "ckv": ("ckv", "kv_c", "kv_c_normed", "c_kv", "compressed_kv"),
    "k_pe": ("k_pe", "k_rope", "kpe"),
    "latents": ("latents", "new_kv", "kv_new", "k_new"),
    "slot_mapping": ("slot_mapping", "slots", "out_loc", "dest_loc", "loc"),
    "out_a": ("out_a", "prefix_output", "v_a", "o_a", "out1"),
    "lse_a": ("lse_a", "prefix_lse", "s_a", "lse1"),
    "out_b": ("out_b", "suffix_output", "v_b", "o_b", "out2"),
    "lse_b": ("lse_b", "suffix_lse", "s_b", "lse2"),
}
"""The names of parameters by their role. Each name has one role, and its case is ignored."""

_ROLE_OF = {name: role for role, names in ALIASES.items() for name in names}
_CHOICES = {  # a function has all the roles of at least one group in each line of its kind
    "attend": (
        ("queries", (("q",), ("q_nope", "q_pe"))),
        ("a cache", (("kv_cache",), ("ckv_cache", "kpe_cache"))),
        (
            "the blocks of each row",
            (("block_table",), ("kv_indptr", "kv_indices"), ("req_to_token",)),
        ),
    ),
    "append": (
        ("tokens", (("ckv", "k_pe"), ("latents",))),
        ("a cache", (("kv_cache",), ("ckv_cache", "kpe_cache"))),
        ("slots", (("slot_mapping",),)),
    ),
    "csr": (
        ("a block table", (("block_table",),)),
        ("lengths", (("seq_lens",),)),
    ),
    "merge": (("two partial results", (("out_a", "lse_a", "out_b", "lse_b"),)),),
}
KINDS = tuple(_CHOICES)


def roles_of(
    functions: list[Callable[..., Any]],
    kind: str,
    mapped: Mapping[str, str],
    given: Mapping[str, Any],
) -> dict[str, str]:
    """Return the role of each parameter of functions that are called one after the other.

    Parameters
    ----------
    functions : list of callable
        A function, or the constructor, ``plan`` and ``run`` of a class.
    kind : {"attend", "append", "merge", "csr"}
        The operation of the function.
    mapped : dict of str to str
        The parameter's name by role, from the options ``--map``.
    given : dict of str to Any
        Fixed values by the parameter's name, from the options ``--set``. A parameter with a value
        gets no role.

    Returns
    -------
    dict of str to str
        The role by the parameter's name. A parameter without a role is absent. A name of
        ``req_to_token`` gives the role ``block_table`` if a parameter has the block size and no
        parameter has the ids of requests.

    Raises
    ------
    InvalidArgument
        A parameter without a default has no role and no value, two parameters of one function have
        the same role, an option names a role or a parameter that does not exist, no parameter has
        a role that this kind of function needs, or a signature is invalid (:func:`parameters_of`).
    """
    parameters = [p for function in functions for p in parameters_of(function)]
    names = list(dict.fromkeys(parameter.name for parameter in parameters))
    _check_options(names, mapped, given)
    by_name = {name: role for role, name in mapped.items()}
    found: dict[str, str] = {}
    for parameter in parameters:
        name = parameter.name
        role = by_name.get(name) or _ROLE_OF.get(name.lower(), "")
        if role and name not in given and mapped.get(role, name) == name:
            found[name] = role
        elif parameter.default is parameter.empty and name not in given:
            allowed = (
                f"--set {name}=VALUE gives the parameter a fixed value; "
                f"--map ROLE={name} gives it its role, one of {', '.join(ALIASES)}"
            )
            raise InvalidArgument(f"parameter {name}", "no role and no value", allowed)
    if {"req_to_token", "block_size"} <= set(found.values()) and not _has_ids(found):
        found = {n: "block_table" if r == "req_to_token" else r for n, r in found.items()}
    for function in functions:
        _check_distinct({p.name: found[p.name] for p in parameters_of(function) if p.name in found})
    _check_complete(set(found.values()), kind)
    return found


def _has_ids(roles: Mapping[str, str]) -> bool:
    """Return whether a parameter has the numbers of requests, which index the lines of a table.

    Without such a parameter, line b of the table belongs to row b of the step.
    """
    return "request_ids" in roles.values()


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a caller can pass by name, without ``self``, ``*`` and ``**``.

    Raises
    ------
    InvalidArgument
        Python cannot read the function's signature, or a parameter is positional-only.
    """
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        allowed = "a Python function that calls it and whose parameters have names"
        raise InvalidArgument(
            "target", f"a function without a signature ({error})", allowed
        ) from None
    for parameter in found:
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            allowed = "a parameter with a name; write a Python function that passes it by position"
            raise InvalidArgument(
                f"parameter {parameter.name}", "a positional-only parameter", allowed
            )
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in found if p.kind not in kinds and p.name != "self"]


def _check_options(names: Collection[str], mapped: Mapping[str, str], given: Iterable[str]) -> None:
    allowed = f"the parameters {', '.join(names)}"
    for role, name in mapped.items():
        if role not in ALIASES:
            raise InvalidArgument("--map", role, ", ".join(ALIASES))
        if name not in names:
            raise InvalidArgument("--map", f"{role}={name}", allowed)
    for name in given:
        if name not in names:
            raise InvalidArgument("--set", name, allowed)


def _check_distinct(roles: Mapping[str, str]) -> None:
    names: dict[str, str] = {}
    for name, role in roles.items():
        other = names.setdefault(role, name)
        if other != name:
            allowed = f"one parameter with this role; use --map {role}={name} or {role}={other}"
            raise InvalidArgument(f"parameters {other} and {name}", "the same role", allowed)


def _check_complete(roles: set[str], kind: str) -> None:
    for what, groups in _CHOICES[kind]:
        if not any(roles >= set(group) for group in groups):
            allowed = " or ".join(" and ".join(group) for group in groups)
            raise InvalidArgument(
                f"{what} of the function",
                "no parameter with this role",
                f"--map ROLE=NAME gives a parameter its role; the needed roles are {allowed}",
            )
