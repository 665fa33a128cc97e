"""Where releases of SGLang differ, as far as these classes meet it. One source serves all.

=============================================  =======================  ======  ===================
what                                           0.5.17                   since   is
=============================================  =======================  ======  ===================
what makes a draft's backend                   returns a backend        0.5.18  returns a name and
                                                                                a backend
a draft's backend                              has no name              0.5.18  has the name of its
                                                                                kind
names of a runner's backends                   the server's arguments'  0.5.18  the runner's,
                                                                                before it has one
a pool that moves tokens about                 its allocator's          0.5.19  ``kv_index_
                                               ``translate_kv_loc``             translator`` of the
                                                                                runner
the pool's own writer and slot 0               writes it                0.5.19  leaves it out, as
                                                                                ours does
a prompt's tokens without padding of ranks     ``num_token_non_         0.5.20  ``global_num_token_
                                               padded_cpu``                     non_padded_cpu``;
                                                                                layers hand on
                                                                                these alone
=============================================  =======================  ======  ===================

Surfaces are recorded in ``optimized/tests/engines/sglang_surfaces``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

RECORDED = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""Releases whose surface the tests hold these classes against."""

OLDEST = (0, 5, 17)
"""The first release that these classes are given to."""


def moves_tokens(runner: Any) -> bool:
    """Return whether the map of requests to tokens holds other numbers than slots."""
    translator = getattr(runner, "kv_index_translator", None)
    if translator is not None:
        return bool(translator.reads_are_translated)
    return getattr(runner.token_to_kv_pool_allocator, "translate_kv_loc", None) is not None


def attention_backends(runner: Any) -> tuple[str, str]:
    """Return the names of what attends prefill and decode rows of a runner."""
    if getattr(runner, "prefill_attention_backend_str", None) is not None:
        return runner.prefill_attention_backend_str, runner.decode_attention_backend_str
    prefill, decode = runner.server_args.get_attention_backends()
    return prefill, decode


def tokens_of(batch: Any) -> int:
    """Return how many tokens of prompts a batch has, without those that pad it for other ranks.

    It counts none where it is a half of another, or made up for an idle rank: then none is padding.
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
    """Return what makes drafts' backends, ours among them, so that each has the name of its kind.

    A layer asks the backend that runs it for that name, and falls back on the target's: then it
    would hand queries to a draft's backend in the way that the target's takes them.

    Parameters
    ----------
    create_backend : callable
        ``DraftBackendFactory._create_backend``, which takes them from such a table.
    makers : dict
        By name.
    name : str
    make : callable
        Makes ours.
    """
    if "stamps_children" in inspect.signature(create_backend).parameters:
        return makers | {name: lambda: (name, make())}
    return {
        known: partial(_named, known, maker) for known, maker in (makers | {name: make}).items()
    }


def _named(name: str, make: Callable[[], Any]) -> Any:
    backend = make()
    for one in (backend, *getattr(backend, "attn_backends", ())):  # of the steps of a draft
        one.prefill_attention_backend_str = one.decode_attention_backend_str = name
    return backend
