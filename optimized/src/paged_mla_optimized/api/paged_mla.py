"""Paged MLA for a serving engine: plan once per step, append and attend once per layer."""

from __future__ import annotations

import torch

from paged_mla_optimized.api import torch_ops as ops
from paged_mla_optimized.api.core import Core
from paged_mla_optimized.api.planned import PlannedStep, Planner, explained
from paged_mla_optimized.api.warm_up import warm_up
from paged_mla_optimized.config.arguments import check_kind
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.planning.choice import step_query_len
from paged_mla_optimized.planning.explain import Explanation
from paged_mla_optimized.planning.families import AttendVariant
from paged_mla_optimized.planning.plan import HostPlan
from paged_mla_optimized.runtime.log import LOGGER
from paged_mla_optimized.tensors import checks
from paged_mla_optimized.tensors.host_lengths import HostLengths
from paged_mla_optimized.tensors.latent_cache import Cache, as_cache
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep, RequestMap


class PagedMla(Planner):
    """Paged multi-head latent attention. Every buffer is allocated here, none later.

    ``plan``, ``append`` and ``attend`` launch kernels on the current stream and never wait for the
    device, so they can be captured in a CUDA graph. They allocate nothing but the answers of an
    ``attend`` that is given no tensors for them. A replay reads lengths, tables and masks from the
    same tensors again. Under ``torch.compile`` they are the ops of
    :mod:`paged_mla_optimized.api.torch_ops`.

    Parameters
    ----------
    config : MlaConfig
    device : str or torch.device
        A CUDA device; a CPU where Triton's interpreter runs (``TRITON_INTERPRET=1``).
    variant : AttendVariant or None
        Tile sizes of every step; ``None`` lets each step choose from
        :mod:`paged_mla_optimized.planning.families`.
    workspace : float32 [n] or None
        :attr:`workspace` of another instance that runs on the same stream, at least as large;
        ``None`` allocates one. Nothing in it outlives a call.
    steps_in_flight : int
        So many planned steps stay valid at once, >= 1: each has buffers of its own. All run on one
        stream. A compiled function uses those of the latest step alone.

    Raises
    ------
    InvalidArgument
        `steps_in_flight` is below 1, or `workspace` is too small.
    Unsupported
        No kernel runs on `device`; or bfloat16 in Triton's interpreter.
    """

    def __init__(
        self,
        config: MlaConfig,
        device: str | torch.device = "cuda",
        *,
        variant: AttendVariant | None = None,
        workspace: torch.Tensor | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        self._core = core = Core(
            config,
            device,
            variant=variant,
            workspace=workspace,
            steps_in_flight=steps_in_flight,
        )
        self.config, self.device = config, core.device
        self._handle = ops.register(core)
        total = sum(buffer.nbytes for buffer in self.memory())
        LOGGER.info("%s on %s: %s, %s bytes", config, core.device, core.variants, f"{total:,}")

    def warm_up(self, cache: Cache, request_map: RequestMap | None = None) -> None:
        """Compile what any step launches, or load it from where Triton keeps binaries.

        A kernel compiles at its first launch, for seconds in which requests wait, and which a
        capture does not bear. Call this once the cache is there: it launches ``plan``, ``append``,
        ``attend`` and ``gather_context`` in every kernel that they have, for steps of padding.
        Nothing of the cache is read or written, and the planned step stays.

        Binaries are those for dense queries, answers and latents, on 16 bytes. Strides of other
        tensors are compiled for at their first step, and so is the portable kernel where the cache
        or the queries do not fit a Gluon one.

        Parameters
        ----------
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            As :meth:`attend` will be given it; other layers' of the same strides need no call.
        request_map : RequestMap or None
            One as steps are planned with; ``None`` if they have block tables.

        Raises
        ------
        InvalidArgument
            The cache's shape, dtype, device or last stride is wrong, or the map's.
        """
        warm_up(self._core, cache, request_map)

    def plan(self, step: MlaStep) -> PlannedStep:
        """Describe a step. Two launches; lengths are read on the device only.

        A row that S-2 does not allow is treated as padding, whatever the tensors hold; the table
        in ``docs/contract.md`` lists every case.

        Parameters
        ----------
        step : MlaStep

        Returns
        -------
        PlannedStep
            For ``append`` and ``attend``, which take the latest without it.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or capacity is wrong, or a length that the host gives.
            Values of tensors on the device are not looked at: :meth:`check` does that.
        """
        core = self._core
        if torch.compiler.is_compiling():
            return self._plan_compiled(step)
        plan = core.next_plan
        core.fill(plan, step, max_query_len=self._max_query_len(step))
        core.use(plan)
        return PlannedStep(plan)

    def _plan_compiled(self, step: MlaStep) -> PlannedStep:
        plan, table, ids = self._core.plan, step.block_table, None
        given: torch.Tensor | None = None
        if isinstance(table, RequestMap):
            ids, table = table.request_ids, table.req_to_token
        else:
            given = table
        ops.plan(
            plan.state,
            step.cu_seqlens_q,
            step.seq_lens,
            table,
            ids,
            step.mask,
            num_tokens=step.num_tokens,
            max_query_len=step.max_query_len,
            handle=self._handle,
        )
        # Kernels that were chosen here would make a graph for each `max_query_len`.
        plan.host = HostPlan(
            step.seq_lens.shape[0], step.num_tokens, step.max_query_len, None, 1, given
        )
        return PlannedStep(plan)

    def _max_query_len(self, step: MlaStep) -> int | None:
        """Return the longest query, as far as the host knows it and kernels may follow it."""
        check_kind("step", step, MlaStep)
        host = HostLengths.of(self.config, step)
        if host is None or self.config.batch_invariant:
            return step.max_query_len
        return host.max_query_len

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None = None,
        *,
        planned: PlannedStep | None = None,
    ) -> None:
        """Write a planned step's latents and keys to the cache (S-10, S-12).

        Parameters
        ----------
        ckv : dtype [T, R]
        k_pe : dtype [T, P]
            Unrotated if the config has a rope, else as it will be cached.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, the last one 1.
        slot_mapping : int64 [T] or None
            Where to write; ``None`` takes the plan's slots. Slots below 0 or past the cache write
            nothing.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` takes the latest.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong; or `planned`.
        """
        core, plan = self._core, self._plan_of(planned)
        if torch.compiler.is_compiling():
            cache = as_cache(core.config.cache_format, cache)
            ops.append(
                plan.state,
                ckv,
                k_pe,
                cache.latents,
                cache.scales,
                slot_mapping,
                num_tokens=plan.num_tokens,
                handle=self._handle,
            )
        else:
            core.check_append(plan, cache, slot_mapping)
            core.append(plan, ckv, k_pe, cache, slot_mapping)

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: Cache,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        planned: PlannedStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every query of a planned step to the cache (S-4 to S-7).

        Parameters
        ----------
        q_nope : dtype [T, H, R]
            Absorbed queries.
        q_pe : dtype [T, H, P]
            Unrotated if the config has a rope.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, the last one 1.
        out : dtype [T, H, R] or None
        lse : float32 [T, H] or None
            Where to write; ``None`` allocates, in the graph's own memory while one is captured.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` takes the latest.

        Returns
        -------
        out : dtype [T, H, R]
        lse : float32 [T, H]
            In the config's base. Queries that see nothing, and padded tokens, have (0, -inf).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong; or `planned`.
        """
        core, plan = self._core, self._plan_of(planned)
        check_kind("q_nope", q_nope, torch.Tensor)
        out = q_nope.new_empty(q_nope.shape) if out is None else out
        lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32) if lse is None else lse
        if not torch.compiler.is_compiling():
            core.check_attend(plan, cache)
            core.attend(plan, Queries(q_nope, q_pe), cache, Answer(out, lse))
            return out, lse
        cache = as_cache(core.config.cache_format, cache)
        ops.attend(
            plan.state,
            q_nope,
            q_pe,
            out,
            lse,
            cache.latents,
            cache.scales,
            plan.host.given_table,
            num_rows=plan.num_rows,
            num_tokens=plan.num_tokens,
            max_query_len=plan.host.max_query_len,
            handle=self._handle,
        )
        return out, lse

    def quantize_queries(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        planned: PlannedStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the planned step's queries as e4m3 codes, rotated, with scales (S-11, S-12).

        One launch, for kernels of FP8 products that are not this package's: :meth:`attend` takes
        queries as they are.

        Parameters
        ----------
        q_nope : dtype [T, H, R]
        q_pe : dtype [T, H, P]
            Unrotated if the config has a rope.
        scale : float32 [] or None
            Finite and > 0, on the device, not looked at: what divides all queries, of which those
            past 448 times it become that. ``None`` takes a scale from the data for each token and
            head.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` takes the latest.

        Returns
        -------
        codes : float8_e4m3fn [T, H, R + P]
            Dense; infinite numbers are NaN.
        scales : float32 [T, H]
            What each line's codes are multiplied by.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong.
        """
        plan = self._plan_of(planned)
        if not torch.compiler.is_compiling():
            return self._core.quantize_queries(plan, q_nope, q_pe, scale)
        num_tokens, handle = plan.num_tokens, self._handle
        found: tuple[torch.Tensor, torch.Tensor] = ops.quantize_queries(
            plan.state, q_nope, q_pe, scale, num_tokens=num_tokens, handle=handle
        )
        return found

    def explain(self, step: MlaStep) -> Explanation:
        """Return which kernel, tiles, grid and splits a step gets, and why; synchronises.

        Raises
        ------
        InvalidArgument
            As :meth:`plan` does.
        """
        max_query_len = self._max_query_len(step)
        checks.check_step(self.config, step, self.device)
        return explained(self._core, step, max_query_len)

    def check(
        self,
        step: MlaStep,
        *,
        num_blocks: int | None = None,
        cache: Cache | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Hold the *values* of a step against the rules; for debugging, since it synchronises.

        Call it before the step's tokens are appended. ``PAGED_MLA_CHECK=1`` has every eager
        ``plan`` call it. Lengths on the host are compared with those on the device.

        Parameters
        ----------
        step : MlaStep
        num_blocks : int or None
            Of the cache; ``None`` takes those of `cache`. Without both, no block is too large.
        cache : LatentCache, Tensor or None
            A layer's. If it is FP8, its scales of the tokens that were cached before this step are
            looked at: they are finite and above 0 (S-11).
        slot_mapping : int64 [T] or None
            As for :meth:`append`; ``None`` takes the plan's slots.

        Raises
        ------
        InvalidArgument
            Names the argument that no rule allows: a block that no cache has, twice in a row's
            table, or in two rows where the step writes to it (S-13), and so on.
        """
        max_query_len = self._max_query_len(step)
        self._core.check(step, slot_mapping=slot_mapping, num_blocks=num_blocks, cache=cache)
        step_query_len(self.config, step.num_rows, step.num_tokens, max_query_len)
