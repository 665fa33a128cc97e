"""How much work a schedule is: what its steps list, in units of a block or a token.

A file of a few hundred bytes can ask for years of it, so that there is a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paged_mla_reference.rules.paging import blocks_of
from paged_mla_reference.simulator.config import EngineConfig
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.step import Step
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.errors import InvalidArgument

MOST_WORK = 1 << 26
"""Of one schedule: about a minute of one core."""
MOST_PRODUCTS = 1 << 38
"""Of the answers of one trace: about five minutes of one core."""
MOST_NUMBERS = 1 << 28
"""Of the batch of one step and its answers: 2 GiB in float64."""
MOST_LISTED = 1 << 23
"""Blocks in the rows of all steps of a page, which then has about 60 MB."""
MOST_BATCHES = 1 << 15
"""Of one trace, whatever they hold: about five minutes of one core."""
_OF_STEP, _OF_REQUEST = 64, 16  # what a step and a running request cost besides blocks and tokens
_WAITING, _KNOWN = 16, 64  # so many requests, and so many of their tokens, are looked at in a unit
_OF_PAIR = 1024  # products that a query and a key cost besides those of their heads
_ALLOWED = (
    f"at most {MOST_WORK:,} blocks and tokens in the rows of all steps: larger blocks, or fewer or "
    "shorter requests"
)


def check_least_work(config: EngineConfig, requests: Iterable[Request]) -> None:
    """Check, without a step, that the output of requests is not too much work by itself.

    Each step adds one token to a row, or its drafts too, and lists the row's blocks. Requests that
    hang up may end before that.

    Raises
    ------
    InvalidArgument
        Names the request that is too much.
    """
    each = 1 if config.drafts is None else 1 + config.drafts.depth
    work = 0
    for number, request in enumerate(requests):
        if request.abort is None:
            steps = len(request.output) // each
            middle = len(request.prompt) + len(request.output) // 2
            work += steps * (_OF_REQUEST + blocks_of(middle, config.span))
        if work > MOST_WORK:
            given = f"{len(request.tokens):,} tokens in blocks of {config.span}"
            raise InvalidArgument(
                f"requests[{number}]", f"{given}, {work:,} units of work", _ALLOWED
            )


def check_answers(pairs: int, batches: int, dims: MlaDims) -> None:
    """Check that the answers of a trace, over `pairs` of a query and a key, are not too much work.

    Parameters
    ----------
    pairs, batches : int
        Of all steps; a step has a batch for each rank.
    dims : MlaDims

    Raises
    ------
    InvalidArgument
    """
    if batches > MOST_BATCHES:
        allowed = f"at most {MOST_BATCHES:,}: fewer ranks, or fewer steps"
        raise InvalidArgument("trace", f"{batches:,} batches", allowed)
    of_heads = dims.num_heads * (dims.kv_lora_rank + dims.qk_rope_head_dim)
    most = MOST_PRODUCTS // (_OF_PAIR + of_heads)
    if pairs > most:
        allowed = f"at most {most:,} with these dims: smaller dims, or fewer or shorter requests"
        raise InvalidArgument("trace", f"{pairs:,} pairs of a query and a key", allowed)


def check_arrays(
    number: int,
    dims: MlaDims,
    *,
    world: int,
    num_tokens: int,
    num_rows: int,
    blocks: Iterable[Sequence[int]],
) -> None:
    """Check that the batch of one step, padding included, and its answers can be held at once.

    Parameters
    ----------
    number : int
        Of the step.
    dims : MlaDims
    world : int
        Ranks; where there are several, each token is a row of its own.
    num_tokens, num_rows : int
        Of the step, padding included.
    blocks : iterable of sequence of int
        Of each row; the block table has as many columns as the longest has blocks.

    Raises
    ------
    InvalidArgument
    """
    of_head = dims.qk_rope_head_dim + 3 * dims.kv_lora_rank  # a query, and two answers to it
    rows = num_rows if world == 1 else num_tokens
    columns = max(map(len, blocks), default=1)
    numbers = num_tokens * dims.num_heads * of_head + rows * columns
    if numbers > MOST_NUMBERS:
        given = f"{numbers:,} numbers in step {number}"
        allowed = f"at most {MOST_NUMBERS:,}: smaller dims, or fewer tokens and rows in a step"
        raise InvalidArgument("trace", given, allowed)


def check_page(listed: int) -> None:
    """Check that a page which lists so many blocks, in the rows of all steps, can be opened.

    Raises
    ------
    InvalidArgument
    """
    if listed > MOST_LISTED:
        allowed = f"at most {MOST_LISTED:,}: larger blocks, fewer steps, or no page"
        raise InvalidArgument("--html", f"{listed:,} blocks in the rows of all steps", allowed)


class Work:
    """Counts the work of an engine's steps.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._done = engine, 0

    def add(self, step: Step) -> None:
        """Count a step that the engine has just made.

        Raises
        ------
        InvalidArgument
            All steps up to this one are too much.
        """
        engine = self._engine
        self._done += _OF_STEP + _OF_REQUEST * (len(step.rows) + len(engine.running))
        self._done += sum(len(row.blocks) + row.query_len for row in step.rows)
        if engine.waiting:  # all are looked through for those that hang up, the first for a hit
            known = engine.waiting[0].known
            self._done += len(engine.waiting) // _WAITING
            self._done += known // engine.config.span + known // _KNOWN
        if self._done > MOST_WORK:
            given = f"{self._done:,} units of work up to step {step.number}"
            raise InvalidArgument("requests", given, _ALLOWED)
