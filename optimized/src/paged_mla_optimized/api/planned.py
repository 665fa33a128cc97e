"""A planned step, and what :class:`PagedMla` and :class:`MlaLayer` have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from paged_mla_optimized.api.core import Core, Reader
from paged_mla_optimized.config.arguments import check_kind
from paged_mla_optimized.operations.gather.launch import Gather, Spans
from paged_mla_optimized.planning.explain import Buffer, Explanation, explain
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.runtime.device import is_capturing
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_optimized.tensors.latent_cache import Cache, LatentCache, empty_cache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

READERS: tuple[type[Reader], ...] = (Gather,)
"""Operations that read the cached rows of a step; a warm-up launches them too."""


class PlannedStep(Uncopied):
    """A step as it was planned: engines keep it with the batch, for ``append`` and ``attend``.

    It is valid until its instance has planned ``steps_in_flight`` further steps, which then use the
    same buffers. What its properties return in a compiled function are copies.

    Attributes
    ----------
    is_captured : bool
        Whether a graph, or a compiled function, planned the step: it may be planned again on the
        device, without a call that the host sees.
    """

    def __init__(self, plan: Plan) -> None:
        self.is_captured = torch.compiler.is_compiling() or is_capturing(plan.state.device)
        self._plan: Plan = plan
        self._host = plan.host
        plan.latest = self

    @property
    def plan(self) -> Plan:
        """Buffers that describe the step.

        Raises
        ------
        InvalidArgument
            A later step uses them.
        """
        if self.is_stale:
            raise InvalidArgument(
                "planned",
                "a step whose buffers a later step uses",
                "one of the latest steps, as many as steps_in_flight of the instance",
            )
        return self._plan

    @property
    def is_stale(self) -> bool:
        """Whether a later step uses the buffers."""
        return self._plan.latest is not self

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the step (S-3), int64 [T]; 0 for padding."""
        return self.plan.planned("positions", self.plan.num_tokens)

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the step (S-1), int64 [T]; -1 for padding."""
        return self.plan.planned("slot_mapping", self.plan.num_tokens)

    @property
    def block_table(self) -> torch.Tensor:
        """Block table of the step, int32 [B, M]: the one given, or the one built."""
        return self.plan.block_table

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Prefix sums of the step's ``seq_lens``, int32 [B + 1].

        Sums past 2 ** 31 - 1, of rows that share their blocks, stay there: int32 is what engines
        take, and ``gather_context`` writes no more lines.
        """
        return self.plan.planned("key_starts", self.plan.num_rows + 1)

    def is_in(self, plan: Plan) -> bool:
        """Return whether the step was planned into these buffers."""
        return self._plan is plan

    def renew(self) -> Plan:
        """Make the step the latest one of its buffers again; return those."""
        self._plan.host, self._plan.latest = self._host, self
        return self._plan


class Planner(Uncopied):
    """What an object that plans steps has: the latest step, its memory, caches and checks."""

    _core: Core
    device: torch.device

    @property
    def planned(self) -> PlannedStep:
        """The latest planned step."""
        latest: PlannedStep | None = self._core.plan.latest
        return PlannedStep(self._core.plan) if latest is None else latest

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the latest step (S-3), int64 [T]; 0 for padding."""
        return self.planned.positions

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the latest step (S-1), int64 [T]; -1 for padding."""
        return self.planned.slot_mapping

    @property
    def block_table(self) -> torch.Tensor:
        """Block table of the latest step, int32 [B, M]: the one given, or the one built."""
        return self.planned.block_table

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Prefix sums of the latest step's ``seq_lens``, see :class:`PlannedStep`."""
        return self.planned.cu_seqlens_k

    @property
    def workspace(self) -> torch.Tensor:
        """Scratch memory, float32 [n], that another instance may share."""
        return self._core.workspace.memory

    def new_cache(self, num_blocks: int) -> LatentCache:
        """Return a cache of the config's format for one layer, all zeros, on this device.

        Parameters
        ----------
        num_blocks : int
            0 to 2^31 - 1.

        Returns
        -------
        LatentCache
            Latents [num_blocks, block_size, R + P] in plain formats, and scales where the format
            has some; the scale of a whole layer is 1.

        Raises
        ------
        InvalidArgument
            `num_blocks` is no integer in this range.
        """
        return empty_cache(self._core.config, num_blocks, self.device)

    def gather_context(
        self,
        cache: Cache,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        *,
        planned: PlannedStep | None = None,
    ) -> None:
        """Read every planned row's cached tokens, row after row (S-1, S-9). One launch.

        Row b fills lines ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``; lines past the last are
        left as they were.

        Parameters
        ----------
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, the last one 1.
        ckv : dtype [K, R]
        k_pe : dtype [K, P]
            Where to write; K is at least the sum of ``seq_lens``, what passes it is dropped;
            and at most 2 ** 31 - 1.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` takes the latest.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong; or `planned`.
        """
        plan, core = self._plan_of(planned), self._core
        core.check_attend(plan, cache)
        core.reader(Gather).read(Spans.whole(plan), core.as_cache(cache), ckv=ckv, k_pe=k_pe)

    def memory(self) -> list[Buffer]:
        """Return every tensor this instance holds on its device, largest first."""
        return self._core.memory()

    def unchecked(self) -> AbstractContextManager[None]:
        """Leave steps within unchecked, whatever ``PAGED_MLA_CHECK`` says: those of a warm-up."""
        return self._core.switch.off()

    def writes_elsewhere(self) -> None:
        """Declare that the engine writes a step's tokens itself, to slots that are not the plan's.

        ``PAGED_MLA_CHECK`` then leaves the plan's slots alone.
        """
        self._core.writes_planned_slots = False

    def resume(self, planned: PlannedStep) -> None:
        """Make a step the latest planned one: after a replay of the graph that planned it.

        A replay rewrites the buffers on the device, and the host does not know it. Without this
        call, ``append``, ``attend`` and all that is read of the planned step outside the graph use
        the sizes and the block table of the step that was planned last. ``GraphedStep`` calls it.

        Parameters
        ----------
        planned : PlannedStep
            What ``plan`` of this instance returned while the graph was captured.

        Raises
        ------
        InvalidArgument
            Another instance planned the step; or it is no planned step; or a later step uses its
            buffers, and no graph planned it, so that no replay can have brought it back.
        """
        self._check_own(planned)
        if planned.is_stale and not planned.is_captured:
            raise InvalidArgument(
                "planned",
                "a step whose buffers a later step uses, and that no graph planned",
                "a step that was planned while a graph was captured, or one of the latest steps, "
                "as many as steps_in_flight of the instance",
            )
        self._core.use(planned.renew())

    def _plan_of(self, planned: PlannedStep | None) -> Plan:
        """Return the buffers of a step, of the latest one for ``None``."""
        if planned is None:
            return self._core.plan
        self._check_own(planned)
        return planned.plan

    def _check_own(self, planned: PlannedStep) -> None:
        check_kind("planned", planned, PlannedStep)
        if not any(planned.is_in(plan) for plan in self._core.plans):
            allowed = "what plan() of this instance returned"
            raise InvalidArgument("planned", "a step that another instance planned", allowed)


def explained(core: Core, step: MlaStep, max_query_len: int | None) -> Explanation:
    """Return which kernel, tiles, grid and splits a step gets, and why; synchronises."""
    host = core.host_plan(step, max_query_len)
    assert host.choice is not None
    longest = step.most_keys(core.config.block_size)
    seq_lens = step.seq_lens.tolist()
    return explain(
        core.config,
        core.variants[host.choice],
        num_sms=core.facts.num_sms,
        demand=core.demand,
        query_len=host.query_len,
        starts=step.cu_seqlens_q.tolist(),
        seq_lens=[0 if length > longest else length for length in seq_lens],
        num_tokens=host.num_tokens,
    )
