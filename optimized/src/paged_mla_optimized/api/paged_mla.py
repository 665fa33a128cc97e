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
    """Paged multi-head latent attention; the constructor allocates every buffer.

    ``plan``, ``append`` and ``attend`` launch kernels on the current stream and never wait for the
    device, so a CUDA graph can capture them. They allocate no memory except the outputs of an
    ``attend`` without `out` and `lse`. A graph replay reads lengths, tables and masks from the same
    tensors again. Under ``torch.compile`` these methods are the ops of
    :mod:`paged_mla_optimized.api.torch_ops`.

    Parameters
    ----------
    config : MlaConfig
    device : str or torch.device
        A CUDA device, or a CPU with Triton's interpreter (``TRITON_INTERPRET=1``).
    variant : AttendVariant or None
        Kernel variant of every step. ``None`` chooses a variant for each step from
        :mod:`paged_mla_optimized.planning.families`.
    workspace : float32 [n] or None
        The :attr:`workspace` of another instance that runs on the same stream, at least as large
        as this instance needs. ``None`` allocates a workspace. Its contents are used only during a
        call.
    steps_in_flight : int
        Number of planned steps that are valid at the same time, >= 1; each has separate buffers.
        All steps run on one stream. A compiled function uses the buffers of the latest step only.

    Raises
    ------
    InvalidArgument
        An argument has a wrong type, `steps_in_flight` is below 1, or the dtype, device or size of
        `workspace` is wrong.
    Unsupported
        No kernel runs on `device`, or the dtype is bfloat16 in Triton's interpreter.
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
        """Compile every kernel that a step can launch, or load it from Triton's cache.

        A kernel compiles at its first launch. That takes seconds, and it fails during a graph
        capture. Call this method once the cache is allocated: it launches every kernel of
        ``plan``, ``append``, ``attend`` and ``gather_context`` for steps of padding. It neither
        reads nor writes the cache, and the planned step stays valid.

        The compiled kernels are for dense queries, outputs and latents that are aligned to 16
        bytes. Kernels for other strides compile at their first step. So does the portable kernel,
        if the cache or the queries do not fit a Gluon kernel.

        Parameters
        ----------
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            The cache that :meth:`attend` will get. Caches of other layers with the same strides
            need no further call.
        request_map : RequestMap or None
            A request map like those of later steps; ``None`` if the steps have block tables.

        Raises
        ------
        InvalidArgument
            The shape, dtype, device or last stride of the cache or of the map is wrong.
        """
        warm_up(self._core, cache, request_map)

    def plan(self, step: MlaStep) -> PlannedStep:
        """Plan a step with two kernel launches; lengths are read on the device only.

        The kernels treat a row that S-2 does not allow as padding, for all values of its tensors.
        The table in ``docs/contract.md`` lists every case.

        Parameters
        ----------
        step : MlaStep

        Returns
        -------
        PlannedStep
            The planned step, for ``append`` and ``attend``. Without it, they use the latest step.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype or device is wrong, the step exceeds a capacity, or a length on
            the host is wrong. Only :meth:`check` checks the values of tensors on the device.
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
        # A kernel choice here would compile one graph for each `max_query_len`.
        plan.host = HostPlan(
            step.seq_lens.shape[0], step.num_tokens, step.max_query_len, None, 1, given
        )
        return PlannedStep(plan)

    def _max_query_len(self, step: MlaStep) -> int | None:
        """Return the longest query length that chooses the kernel; ``None`` if it is unknown."""
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
        """Write the latents and rotated keys of a planned step to the cache (S-10, S-12).

        Parameters
        ----------
        ckv : dtype [T, R]
        k_pe : dtype [T, P]
            Unrotated if the config has a rope; otherwise as the cache will store it.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, but the last stride is 1.
        slot_mapping : int64 [T] or None
            The slot of each token. ``None`` uses the plan's slots. Tokens are not written if their
            slot is below 0, past the cache, or the ``reserved_slot`` of the config.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` uses the latest step.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong, the cache overlaps
            another tensor, or `planned` is not valid.
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
        """Attend every query token of a planned step to the cache (S-4 to S-7).

        Parameters
        ----------
        q_nope : dtype [T, H, R]
            Absorbed queries.
        q_pe : dtype [T, H, P]
            Unrotated if the config has a rope.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, but the last stride is 1.
        out : dtype [T, H, R] or None
        lse : float32 [T, H] or None
            Where to write the outputs. ``None`` allocates; during a graph capture, the memory
            belongs to the graph.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` uses the latest step.

        Returns
        -------
        out : dtype [T, H, R]
        lse : float32 [T, H]
            In the config's base. Queries without visible keys, and padded tokens, have (0, -inf).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong, `out` or `lse` overlaps
            another tensor, or `planned` is not valid.
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
        """Return the planned step's queries as rotated e4m3 codes with scales (S-11, S-12).

        This method launches one kernel. It serves FP8 kernels of other projects; :meth:`attend`
        takes unquantized queries.

        Parameters
        ----------
        q_nope : dtype [T, H, R]
        q_pe : dtype [T, H, P]
            Unrotated if the config has a rope.
        scale : float32 [] or None
            The divisor of all queries, on the device; finite and > 0, which is not checked.
            Quotients beyond 448 in magnitude saturate. ``None`` computes a scale from the data for
            each token and head.
        planned : PlannedStep or None
            A step that this instance planned; ``None`` uses the latest step.

        Returns
        -------
        codes : float8_e4m3fn [T, H, R + P]
            Dense. Codes of infinite elements are NaN.
        scales : float32 [T, H]
            The factor of the codes of each token and head.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong, or `planned` is not valid.
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
        """Return the kernel, tiles, grid and splits of a step, with the reasons; synchronizes.

        Raises
        ------
        InvalidArgument
            The errors of :meth:`plan`.
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
        """Check the *values* of a step against the rules; for debugging, since it synchronizes.

        Call it before the step's tokens are appended. With ``PAGED_MLA_CHECK=1`` every eager
        ``plan`` calls it. Lengths on the host are compared with those on the device.

        Parameters
        ----------
        step : MlaStep
        num_blocks : int or None
            Blocks of the cache; ``None`` uses the number of `cache`. Without both, block numbers
            have no upper limit.
        cache : LatentCache, Tensor or None
            The cache of a layer. If it is FP8, the scales of tokens that were cached before this
            step must be finite and above 0 (S-11).
        slot_mapping : int64 [T] or None
            As for :meth:`append`; ``None`` uses the plan's slots.

        Raises
        ------
        InvalidArgument
            An argument breaks a rule; the error names the argument. Examples are a block that the
            cache does not have, a block that a row's table has twice, and a block that two rows
            share and the step writes (S-13).
        """
        max_query_len = self._max_query_len(step)
        self._core.check(step, slot_mapping=slot_mapping, num_blocks=num_blocks, cache=cache)
        step_query_len(self.config, step.num_rows, step.num_tokens, max_query_len)
