"""Values of a call's roles, and the call of a function or of a class with ``plan`` and ``run``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paged_mla_adapters.call import CacheCall
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.judge.roles import parameters_of
from paged_mla_shared.errors import InvalidArgument


class Arguments:
    """Values of every role in one call; each is made when a parameter asks for it.

    A method ``_role`` makes the value of a role.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def of(self, role: str) -> Any:
        """Return the value of a role, the same one at each time.

        Raises
        ------
        InvalidArgument
            Such a call has no such role.
        """
        if role not in self._made:
            make = getattr(self, f"_{role}", None)
            if make is None:
                raise InvalidArgument("--map", role, "a role of what the function does")
            self._made[role] = make()
        return self._made[role]

    @property
    def passed(self) -> dict[str, torch.Tensor]:
        """Buffers of answers that parameters have got."""
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
        Of another step, which an instance has planned before it plans this one.
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
    """Return a cache [num_blocks, block_size, D] in another layout, where it is a view.

    Raises
    ------
    ValueError
        Its tokens lie apart, and the layout has one axis for all of them.
    """
    if layout.startswith("[slots"):
        if not cache.is_contiguous():
            raise ValueError("the cache's tokens lie apart, and it has one axis for all of them")
        cache = cache.flatten(0, 1)
    if layout in {"[blocks, size, 1, D]", "[slots, 1, D]"}:
        return cache.unsqueeze(-2)
    return cache.unsqueeze(1) if layout == "[blocks, 1, size, D]" else cache
