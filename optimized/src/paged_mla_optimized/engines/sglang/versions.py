"""The differences between releases of SGLang that matter here. One source supports all of them.

=============================================  =======================  ======  ===================
interface                                      in 0.5.17                since   is
=============================================  =======================  ======  ===================
the function that creates a draft's backend    returns a backend        0.5.18  returns a name and
                                                                                a backend
a draft's backend                              has no name              0.5.18  has the name of its
                                                                                kind
names of a runner's backends                   an attribute of the      0.5.18  attributes of the
                                               server's arguments               runner, set before
                                                                                it has a backend
a pool that moves tokens                       ``translate_kv_loc`` of  0.5.19  ``kv_index_
                                               its allocator                    translator`` of the
                                                                                runner
the pool's own writer and slot 0               writes slot 0            0.5.19  skips slot 0, as
                                                                                this package does
a prompt's tokens without padding of ranks     ``num_token_non_         0.5.20  ``global_num_token_
                                               padded_cpu``                     non_padded_cpu``;
                                                                                layers pass only
                                                                                these tokens
=============================================  =======================  ======  ===================

``optimized/tests/engines/sglang_surfaces`` contains the recorded interfaces of each release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

RECORDED = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""The releases whose recorded interfaces the tests compare with these classes."""

OLDEST = (0, 5, 17)
"""The first release in which the backend is registered."""


def moves_tokens(runner: Any) -> bool:
    """Return whether the map from requests to tokens contains numbers other than slots."""
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None:
        return bool(translator.reads_are_translated)
    return getattr(runner.token_to_kv_pool_allocator, "translate_kv_loc", None) is not None


def attention_backends(runner: Any) -> tuple[str, str]:
    """Return the names of a runner's attention backends for prefill and for decode."""
    if getattr(runner, "prefill_attention_backend_str", None) is not None:
        return runner.prefill_attention_backend_str, runner.decode_attention_backend_str
    prefill, decode = runner.server_args.get_attention_backends()
    return prefill, decode


def tokens_of(batch: Any) -> int:
    """Return the number of tokens of a prefill batch, without padding for other ranks.

    A batch that is half of another batch, or a dummy batch of an idle rank, has no such count. It
    contains no padding, so the result is the number of its positions.
    """
    counted = getattr(batch, "global_num_token_non_padded_cpu", None)
    if counted is None:
        counted = getattr(batch, "num_token_non_padded_cpu", None)
    return counted or len(batch.positions)


def with_ours(
    create_backend: Callable[..., Any],
    makers: dict[str, Callable[[], Any]],
    name: str,
    make: Callable[[], Any],
) -> dict[str, Callable[[], Any]]:
    """Return a table of functions that create draft backends, with this package's backend added.

    Each created backend has the name of its kind. A layer reads the name from its backend to choose
    the form of its queries, and without a name it uses the name of the target's backend. A draft's
    backend would then get queries in the form of the target's backend.

    Parameters
    ----------
    create_backend : callable
        ``DraftBackendFactory._create_backend``, which takes the table as an argument.
    makers : dict
        SGLang's own table: name to function.
    name : str
        The name of this package's backend.
    make : callable
        A function that creates this package's backend.
    """
    if "stamps_children" in inspect.signature(create_backend).parameters:
        return makers | {name: lambda: (name, make())}
    return {
        known: partial(_named, known, maker) for known, maker in (makers | {name: make}).items()
    }


def _named(name: str, make: Callable[[], Any]) -> Any:
    backend = make()
    for one in (backend, *getattr(backend, "attn_backends", ())):  # a draft's steps have backends
        one.prefill_attention_backend_str = one.decode_attention_backend_str = name
    return backend
