"""Limits of the work of a schedule. The unit of work is a block or a token that a step lists.

A file of a few hundred bytes can describe a schedule that runs for years, so limits are needed.
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
"""Largest work of one schedule: it takes about a minute on one core."""
MOST_PRODUCTS = 1 << 38
"""Most products for the outputs of one trace: they take about five minutes on one core."""
MOST_NUMBERS = 1 << 28
"""Most numbers in the batch of one step and its outputs: 2 GiB in float64."""
MOST_LISTED = 1 << 23
"""Most blocks in the rows of all steps of a page: the page then has about 60 MB."""
MOST_BATCHES = 1 << 15
"""Most batches of one trace, of any size: they take about five minutes on one core."""
_OF_STEP, _OF_REQUEST = 64, 16  # work of a step and a running request without blocks and tokens
_WAITING, _KNOWN = 16, 64  # waiting requests, and their tokens, that count as one unit of work
_OF_PAIR = 1024  # work of a query and a key, in products, in addition to the products of heads
_ALLOWED = (
    f"at most {MOST_WORK:,} blocks and tokens in the rows of all steps; use larger blocks, or "
    "fewer or shorter requests"
)


def check_least_work(config: EngineConfig, requests: Iterable[Request]) -> None:
    """Check, without running a step, that the outputs of the requests are not too much work.

    Each step adds one token and its drafts to a row and lists the row's blocks. Requests with an
    abort are not counted, because they may end earlier.

    Raises
    ------
    InvalidArgument
        The work is too large; the error names the request at which it passes the limit.
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
    """Check that the outputs of a trace are not too much work.

    Parameters
    ----------
    pairs : int
        Number of pairs of a query and a key in all steps.
    batches : int
        Number of batches of all steps; a step has a batch for each rank.
    dims : MlaDims

    Raises
    ------
    InvalidArgument
        `pairs` or `batches` is too large.
    """
    if batches > MOST_BATCHES:
        allowed = f"at most {MOST_BATCHES:,}; use fewer ranks or fewer steps"
        raise InvalidArgument("trace", f"{batches:,} batches", allowed)
    of_heads = dims.num_heads * (dims.kv_lora_rank + dims.qk_rope_head_dim)
    most = MOST_PRODUCTS // (_OF_PAIR + of_heads)
    if pairs > most:
        allowed = (
            f"at most {most:,} with these dims; use smaller dims, or fewer or shorter requests"
        )
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
    """Check that the batch of one step, padding included, and its outputs fit in memory.

    Parameters
    ----------
    number : int
        Number of the step.
    dims : MlaDims
    world : int
        Number of ranks; with several ranks, each token is a separate row.
    num_tokens, num_rows : int
        Tokens and rows of the step, padding included.
    blocks : iterable of sequence of int
        Block ids of each row; the longest determines the number of columns of the block table.

    Raises
    ------
    InvalidArgument
        The step is too large.
    """
    of_head = dims.qk_rope_head_dim + 3 * dims.kv_lora_rank  # a query, and its two outputs
    rows = num_rows if world == 1 else num_tokens
    columns = max(map(len, blocks), default=1)
    numbers = num_tokens * dims.num_heads * of_head + rows * columns
    if numbers > MOST_NUMBERS:
        given = f"{numbers:,} numbers in step {number}"
        allowed = f"at most {MOST_NUMBERS:,}; use smaller dims, or fewer tokens and rows in a step"
        raise InvalidArgument("trace", given, allowed)


def check_page(listed: int) -> None:
    """Check that a page with `listed` blocks in the rows of all steps is not too large.

    Raises
    ------
    InvalidArgument
        `listed` is too large.
    """
    if listed > MOST_LISTED:
        allowed = f"at most {MOST_LISTED:,}; use larger blocks or fewer steps, or write no page"
        raise InvalidArgument("--html", f"{listed:,} blocks in the rows of all steps", allowed)


class Work:
    """Counter of the work of an engine's steps.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._done = engine, 0

    def add(self, step: Step) -> None:
        """Count the work of the engine's newest step.

        Raises
        ------
        InvalidArgument
            The work of all steps up to this step is more than ``MOST_WORK``.
        """
        engine = self._engine
        self._done += _OF_STEP + _OF_REQUEST * (len(step.rows) + len(engine.running))
        self._done += sum(len(row.blocks) + row.query_len for row in step.rows)
        if engine.waiting:  # the engine checks all for aborts, and the first for a prefix hit
            known = engine.waiting[0].known
            self._done += len(engine.waiting) // _WAITING
            self._done += known // engine.config.span + known // _KNOWN
        if self._done > MOST_WORK:
            given = f"{self._done:,} units of work up to step {step.number}"
            raise InvalidArgument("requests", given, _ALLOWED)
