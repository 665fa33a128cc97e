"""What a user may choose: ``additional_config={"paged_mla": {...}}`` of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged_mla_optimized.config.arguments import check_between, check_kind, check_word
from paged_mla_optimized.config.limits import MAX_TOKENS
from paged_mla_shared.backend import PRODUCTS
from paged_mla_shared.errors import InvalidArgument

KEY = "paged_mla"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Choices that vLLM has no word for.

    Parameters
    ----------
    absorbed_query_len : int
        Rows of up to so many new tokens, 1 to 2^23, are attended to absorbed, over the cache as it
        is; longer ones go vLLM's way, through keys and values of every head. vLLM raises it to what
        a row with all its drafts has.
    products : str
        As :class:`~paged_mla_optimized.config.attention.MlaConfig` has it: "fast" lets kernels
        over FP8 caches round queries and weights to FP8.

    Raises
    ------
    InvalidArgument
    """

    absorbed_query_len: int = 1
    products: str = "exact"

    def __post_init__(self) -> None:
        check_between(1, MAX_TOKENS, **{f"{KEY}.absorbed_query_len": self.absorbed_query_len})
        check_word(f"{KEY}.products", self.products, PRODUCTS)


def options_of(additional_config: Any) -> Options:
    """Return the choices in vLLM's ``additional_config``.

    Raises
    ------
    InvalidArgument
        A key or a value is unknown, or the choices are not spelled as a mapping.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return Options()
    given = additional_config[KEY]
    check_kind(KEY, given, Mapping)
    known = [field.name for field in fields(Options)]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InvalidArgument(f"{KEY}.{unknown[0]}", given[unknown[0]], ", ".join(known))
    return Options(**given)
