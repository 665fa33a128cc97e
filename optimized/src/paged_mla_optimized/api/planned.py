"""A planned step, and the common base class of :class:`PagedMla` and :class:`MlaLayer`."""

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
"""Operations that read the cached rows of a step; a warm-up launches each of them."""


class PlannedStep(Uncopied):
    """A planned step, which an engine keeps and passes to ``append`` and ``attend``.

    It is valid until its instance plans ``steps_in_flight`` further steps, since the last of these
    reuses its buffers. In a compiled function, its properties return copies.

    Attributes
    ----------
    is_captured : bool
        Whether the step was planned during a graph capture or in a compiled function. The device
        may then plan it again without a call that the host sees.
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
            A later step uses the buffers.
        """
        if self.is_stale:
            raise InvalidArgument(
                "planned",
                "a step whose buffers a later step uses",
                "one of the latest steps_in_flight steps of this instance",
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
        """Block table of the step, int32 [B, M]: the caller's table or the table that was built."""
        return self.plan.block_table

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Prefix sums of the step's ``seq_lens``, int32 [B + 1].

        The sums saturate at 2 ** 31 - 1, since engines use int32. They can be larger if rows share
        blocks. ``gather_context`` then writes no more lines than that.
        """
        return self.plan.planned("key_starts", self.plan.num_rows + 1)

    def is_in(self, plan: Plan) -> bool:
        """Return whether the step was planned into the buffers of `plan`."""
        return self._plan is plan

    def renew(self) -> Plan:
        """Make this step the latest step of its buffers again, and return the buffers."""
        self._plan.host, self._plan.latest = self._host, self
        return self._plan


class Planner(Uncopied):
    """The base class of objects that plan steps: the latest step, memory, caches and checks."""

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
        """Block table of the latest step, int32 [B, M]: the caller's table, or the built table."""
        return self.planned.block_table

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Prefix sums of the latest step's ``seq_lens``, see :class:`PlannedStep`."""
        return self.planned.cu_seqlens_k

    @property
    def workspace(self) -> torch.Tensor:
        """Scratch memory, float32 [n], which another instance may share."""
        return self._core.workspace.memory

    def new_cache(self, num_blocks: int) -> LatentCache:
        """Return a cache of the config's format for one layer on this device, filled with zeros.

        Parameters
        ----------
        num_blocks : int
            Number of blocks, 0 to 2^31 - 1.

        Returns
        -------
        LatentCache
            Latents [num_blocks, block_size, R + P] in plain formats. Formats with a scale tensor
            get one; a scale of the whole layer is set to 1.

        Raises
        ------
        InvalidArgument
            `num_blocks` is not an integer in its range.
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
        """Copy every planned row's cached tokens to dense tensors, row by row (S-1, S-9).

        This method launches one kernel. Row b fills lines ``cu_seqlens_k[b]`` to
        ``cu_seqlens_k[b + 1]``; lines after the last row stay unchanged.

        Parameters
        ----------
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, but the last stride is 1.
        ckv : dtype [K, R]
        k_pe : dtype [K, P]
            Where to write. K should be at least the sum of ``seq_lens``, since tokens past K are
            not written; K is at most 2 ** 31 - 1.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` uses the latest step.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong, or `planned` is not valid.
        """
        plan, core = self._plan_of(planned), self._core
        core.check_attend(plan, cache)
        core.reader(Gather).read(Spans.whole(plan), core.as_cache(cache), ckv=ckv, k_pe=k_pe)

    def memory(self) -> list[Buffer]:
        """Return every tensor that this instance has on its device, largest first."""
        return self._core.memory()

    def unchecked(self) -> AbstractContextManager[None]:
        """Disable ``PAGED_MLA_CHECK`` inside a with statement, for example during a warm-up."""
        return self._core.switch.off()

    def writes_elsewhere(self) -> None:
        """Declare that the engine writes tokens to its own slots instead of the plan's slots.

        With ``PAGED_MLA_CHECK``, neither ``plan`` nor ``append`` then checks slots, and ``append``
        does not check the scales of keys.
        """
        self._core.writes_planned_slots = False

    def resume(self, planned: PlannedStep) -> None:
        """Make a step the latest planned step again, after a replay of the graph that planned it.

        A replay rewrites the buffers on the device, but not the sizes on the host. Without this
        call, ``append``, ``attend`` and all properties of the latest step use the sizes and the
        block table of the step that was planned last. ``GraphedStep`` makes this call.

        Parameters
        ----------
        planned : PlannedStep
            The result of :meth:`plan` of this instance during the graph capture.

        Raises
        ------
        InvalidArgument
            `planned` is not a planned step, or another instance planned it. Or a later step uses
            its buffers and it was not planned in a graph, so that no replay can have restored it.
        """
        self._check_own(planned)
        if planned.is_stale and not planned.is_captured:
            raise InvalidArgument(
                "planned",
                "a step whose buffers a later step uses, and that no graph planned",
                "a step that was planned while a graph was captured, or one of the latest "
                "steps_in_flight steps of this instance",
            )
        self._core.use(planned.renew())

    def _plan_of(self, planned: PlannedStep | None) -> Plan:
        """Return the buffers of a step, or of the latest step for ``None``."""
        if planned is None:
            return self._core.plan
        self._check_own(planned)
        return planned.plan

    def _check_own(self, planned: PlannedStep) -> None:
        check_kind("planned", planned, PlannedStep)
        if not any(planned.is_in(plan) for plan in self._core.plans):
            allowed = "a step that plan() of this instance returned"
            raise InvalidArgument("planned", "a step that another instance planned", allowed)


def explained(core: Core, step: MlaStep, max_query_len: int | None) -> Explanation:
    """Return the kernel, tiles, grid and splits of a step, with the reasons; synchronizes."""
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
