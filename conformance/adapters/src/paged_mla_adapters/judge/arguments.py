"""The values of the roles in a call, and the call of a function or class with these values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paged_mla_adapters.call import CacheCall
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.judge.roles import parameters_of
from paged_mla_shared.errors import InvalidArgument


class Arguments:
    """The values of all roles in one call; each value is created when it is first needed.

    A subclass has a method ``_ROLE`` for each role, which returns the value of that role.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def of(self, role: str) -> Any:
        """Return the value of a role; every call returns the same object.

        Raises
        ------
        InvalidArgument
            This kind of call has no such role.
        """
        if role not in self._made:
            make = getattr(self, f"_{role}", None)
            if make is None:
                raise InvalidArgument("--map", role, "a role that this kind of function can have")
            self._made[role] = make()
        return self._made[role]

    @property
    def passed(self) -> dict[str, torch.Tensor]:
        """The buffers for output and lse that parameters received, by role."""
        return {name: self._made[name] for name in ("out", "lse") if name in self._made}


class CacheArguments(Arguments):
    """Values of the roles in a call that reads or writes a cache.

    Parameters
    ----------
    call : CacheCall
    claims : Claims
    """

    def __init__(self, call: CacheCall, claims: Claims) -> None:
        super().__init__()
        self._problem, self._cached, self._claims = call.problem, call, claims
        self._rank = call.problem.dims.kv_lora_rank

    def _kv_cache(self) -> torch.Tensor:
        return cache_view(self._cached.cache, self._claims.cache)

    def _ckv_cache(self) -> torch.Tensor:
        return cache_view(self._cached.cache_parts[0], self._claims.cache)

    def _kpe_cache(self) -> torch.Tensor:
        return cache_view(self._cached.cache_parts[1], self._claims.cache)

    def _kv_lora_rank(self) -> int:
        return self._rank

    def _qk_rope_head_dim(self) -> int:
        return self._problem.dims.qk_rope_head_dim

    def _block_size(self) -> int:
        return self._problem.block_size

    def _k_scale(self) -> float:
        return self._cached.cache_scale

    _v_scale = _k_scale

    def _k_descale(self) -> torch.Tensor:
        return torch.full((1,), self._k_scale(), device=self._cached.cache.device)

    _v_descale = _k_descale


def invoke(
    functions: Sequence[Callable[..., Any]],
    arguments: Arguments,
    claims: Claims,
    before: Arguments | None = None,
) -> Any:
    """Call a function, or a class's constructor, ``plan`` and ``run``; return the last result.

    Parameters
    ----------
    functions : sequence of callable
    arguments : Arguments
    claims : Claims
    before : Arguments or None
        Arguments of another step, which an instance plans before it plans this one.
    """
    first, *methods = functions
    result = first(**_keywords(first, arguments, claims))
    instance = result
    if before is not None:
        for method in methods[:-1]:
            getattr(instance, method.__name__)(**_keywords(method, before, claims))
    for method in methods:
        result = getattr(instance, method.__name__)(**_keywords(method, arguments, claims))
    return result


def _keywords(function: Callable[..., Any], arguments: Arguments, claims: Claims) -> dict[str, Any]:
    names = [parameter.name for parameter in parameters_of(function)]
    found = {name: arguments.of(role) for name, role in claims.roles.items() if name in names}
    return found | {name: value for name, value in claims.given.items() if name in names}


def cache_view(cache: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a cache [num_blocks, block_size, D] as a view in another layout.

    Raises
    ------
    ValueError
        The cache has gaps between its tokens, and the layout has one axis for all tokens.
    """
    if layout.startswith("[slots"):
        if not cache.is_contiguous():
            raise ValueError("the layout needs a cache without gaps between its tokens")
        cache = cache.flatten(0, 1)
    if layout in {"[blocks, size, 1, D]", "[slots, 1, D]"}:
        return cache.unsqueeze(-2)
    return cache.unsqueeze(1) if layout == "[blocks, 1, size, D]" else cache
