"""The options that a user sets by vLLM's ``additional_config={"paged_mla": {...}}``."""

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
    """Options that vLLM itself does not have.

    Parameters
    ----------
    absorbed_query_len : int
        The largest number of new tokens, 1 to 2^23, of a row that counts as decode. Decode rows
        use absorbed attention over the cached latents. Longer rows use vLLM's prefill over per-head
        keys and values. vLLM raises a value that is below the length of a row with all its drafts.
    products : str
        The option of :class:`~paged_mla_optimized.config.attention.MlaConfig`: with "fast" the
        kernels over FP8 caches round queries and weights to FP8.

    Raises
    ------
    InvalidArgument
        A value is outside its range.
    """

    absorbed_query_len: int = 1
    products: str = "exact"

    def __post_init__(self) -> None:
        check_between(1, MAX_TOKENS, **{f"{KEY}.absorbed_query_len": self.absorbed_query_len})
        check_word(f"{KEY}.products", self.products, PRODUCTS)


def options_of(additional_config: Any) -> Options:
    """Return the options in vLLM's ``additional_config``, or the defaults if it has none.

    Raises
    ------
    InvalidArgument
        An option is unknown, its value is outside its range, or the options are not a mapping.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return Options()
    given = additional_config[KEY]
    check_kind(KEY, given, Mapping)
    known = [field.name for field in fields(Options)]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InvalidArgument(
            f"{KEY}.{unknown[0]}", given[unknown[0]], f"only the options {', '.join(known)}"
        )
    return Options(**given)
