"""A scenario: an engine and its requests, which determine a schedule; also its file format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paged_mla_reference.simulator.config import DraftKind, EngineConfig
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.step import Step
from paged_mla_reference.simulator.work import Work, check_least_work
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.documents import read_object, take_version
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import check_format, format_of
from paged_mla_shared.problem import Mask, MaskSpelling, Problem, Rope, RopePairing
from paged_mla_shared.typed import build

VERSION = 1
MOST_HEADS = 128


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A named schedule.

    Parameters
    ----------
    name : str
    why : str
        The purpose of the scenario.
    config : EngineConfig
    requests : tuple of Request
        Requests with distinct ids; all blocks together can hold each of them.
    rope : RopePairing, optional
        Rotate queries and keys inside the step, with this pairing. A cache that is divided among
        ranks allows no rope.
    mask_spelling : MaskSpelling
        Spelling of the masks of verified trees.
    num_heads : int, optional
        Number of the model's heads to use, 1 to 128; all heads by default.
    cache_format : str, optional
        The plain format of the run's dtype by default.
    """

    name: str
    why: str
    config: EngineConfig
    requests: tuple[Request, ...]
    rope: RopePairing | None = None
    mask_spelling: MaskSpelling = MaskSpelling.QLEN
    num_heads: int | None = None
    cache_format: str | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises
        ------
        InvalidArgument
            A value is out of range, two requests have the same id, a request is too long, there is
            a rope on a divided cache, or the requests are too much work.
        """
        if self.num_heads is not None and not 1 <= self.num_heads <= MOST_HEADS:
            raise InvalidArgument("num_heads", self.num_heads, f"1 to {MOST_HEADS}")
        check_format(self.cache_format)
        if self.rope is not None and self.config.group.world > 1:
            raise InvalidArgument("rope", repr(str(self.rope)), "no rope on a divided cache")
        seen: set[str] = set()
        for number, request in enumerate(self.requests):
            if request.id in seen:
                given = f"{request.id!r} a second time"
                raise InvalidArgument(f"requests[{number}].id", given, "distinct ids")
            if len(request.tokens) > self.config.longest:
                allowed = (
                    f"at most {self.config.longest} tokens, the number that fits in all blocks"
                )
                given = f"{len(request.tokens)} tokens"
                raise InvalidArgument(f"requests[{number}]", given, allowed)
            seen.add(request.id)
        check_least_work(self.config, self.requests)

    @property
    def has_trees(self) -> bool:
        """Whether the schedule verifies trees, whose steps need a tree mask."""
        drafts = self.config.drafts
        return drafts is not None and drafts.kind is DraftKind.TREE

    def problem(self, dims: MlaDims, dtype: str, mask: Mask) -> Problem:
        """Return a problem whose capacities hold every step with the given mask."""
        config = self.config
        if self.num_heads is not None:
            dims = dims.with_heads(self.num_heads)
        divided = config.group.world > 1  # every query token is a row
        tokens = config.max_step_tokens
        tree = mask is Mask.TREE
        assert config.drafts is not None or not tree
        return Problem(
            dims=dims,
            dtype=dtype,
            cache_format=format_of(dtype, self.cache_format),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_rows=tokens if divided else config.max_step_rows,
            max_query_tokens=tokens,
            max_model_len=config.num_blocks * config.span,
            softmax_scale=dims.softmax_scale,
            mask=mask,
            mask_spelling=self.mask_spelling,
            max_draft_tokens=config.drafts.max_nodes if tree and config.drafts else 0,
            rope=None if self.rope is None else Rope(self.rope),
        )


def drive(engine: Engine, requests: Sequence[Request]) -> Iterator[Step]:
    """Run an engine until every request is finished or aborted, and yield its steps.

    Each request is submitted at its arrival and aborted at its ``abort`` step.

    Raises
    ------
    InvalidArgument
        The work of the steps is more than ``MOST_WORK``, or the engine rejects a request.
    """
    coming = sorted(requests, key=lambda request: request.arrival)[::-1]
    leaving = sorted(
        ((request.abort, request.id) for request in requests if request.abort is not None),
        reverse=True,
    )
    number, work = 0, Work(engine)
    while coming or engine.busy:
        while coming and coming[-1].arrival <= number:
            engine.submit(coming.pop())
        while leaving and leaving[-1][0] <= number:
            engine.abort(leaving.pop()[1])
        step = engine.step()
        work.add(step)
        yield step
        number += 1


def save_scenario(scenario: Scenario, path: Path) -> None:
    """Write a scenario as JSON, with every token, so that it can be run again anywhere."""
    path.write_text(json.dumps({"version": VERSION, **asdict(scenario)}) + "\n")


def load_scenario(path: Path) -> Scenario:
    """Return the scenario of a file that :func:`save_scenario` wrote.

    Raises
    ------
    InvalidArgument
        The file cannot be read, has another version of the format, or contains no scenario.
    """
    fields = read_object(path)
    take_version(fields, "version", VERSION, str(path))
    scenario: Scenario = build(Scenario, fields, str(path))
    return scenario
