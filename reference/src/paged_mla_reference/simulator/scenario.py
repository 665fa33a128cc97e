"""A workload on an engine: everything that determines a schedule, and a file of it."""

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


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A named schedule.

    Parameters
    ----------
    name : str
    why : str
        What it is there to reach.
    config : EngineConfig
    requests : tuple of Request
        Each with an id of its own, and none too long for all blocks together.
    rope : RopePairing, optional
        Rotate queries and keys inside the step, with this pairing; not on divided caches.
    mask_spelling : MaskSpelling
        Of verified trees.
    num_heads : int, optional
        Of the model's heads, as many as this; all of them by default.
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
        """Refuse requests that the engine cannot tell apart or hold, and ropes of ranks.

        Raises
        ------
        InvalidArgument
        """
        if self.num_heads is not None and not 1 <= self.num_heads <= 128:
            raise InvalidArgument("num_heads", self.num_heads, "1 to 128")
        check_format(self.cache_format)
        if self.rope is not None and self.config.group.world > 1:
            raise InvalidArgument("rope", repr(str(self.rope)), "none on a divided cache")
        seen: set[str] = set()
        for number, request in enumerate(self.requests):
            if request.id in seen:
                given = f"{request.id!r} a second time"
                raise InvalidArgument(f"requests[{number}].id", given, "distinct ids")
            if len(request.tokens) > self.config.longest:
                allowed = f"what fits in all blocks, {self.config.longest}"
                given = f"{len(request.tokens)} tokens"
                raise InvalidArgument(f"requests[{number}]", given, allowed)
            seen.add(request.id)
        check_least_work(self.config, self.requests)

    @property
    def has_trees(self) -> bool:
        """Whether some steps need a tree mask."""
        drafts = self.config.drafts
        return drafts is not None and drafts.kind is DraftKind.TREE

    def problem(self, dims: MlaDims, dtype: str, mask: Mask) -> Problem:
        """Return the problem that holds every step of one mask."""
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
    """Submit every request at its arrival, hang up where it does, and run to the end.

    Raises
    ------
    InvalidArgument
        The steps are more than ``MOST_WORK``.
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
    """Write a scenario as JSON, with every token, so that it can be replayed anywhere."""
    path.write_text(json.dumps({"version": VERSION, **asdict(scenario)}) + "\n")


def load_scenario(path: Path) -> Scenario:
    """Read what :func:`save_scenario` wrote.

    Raises
    ------
    InvalidArgument
        The file is of another version of the format, or holds no scenario.
    """
    fields = read_object(path)
    take_version(fields, "version", VERSION, str(path))
    scenario: Scenario = build(Scenario, fields, str(path))
    return scenario
