"""Paged MLA for a serving engine: plan once per step, append and attend once per layer."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import torch

from paged_mla_optimized import checks, ops
from paged_mla_optimized.cache import Cache, as_cache
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.core import Core, HostStep, PlannedStep
from paged_mla_optimized.given import check_kind, integer
from paged_mla_optimized.inspect.explain import Buffer, Explanation, explain
from paged_mla_optimized.launchers.gather import Spans
from paged_mla_optimized.planning.choice import step_query_len
from paged_mla_optimized.planning.families import AttendVariant
from paged_mla_optimized.runtime.log import LOGGER
from paged_mla_optimized.stepping.warm_up import warm_up
from paged_mla_optimized.tables import RequestMap
from paged_mla_shared.errors import InvalidArgument


class PagedMla(PlannedStep):
    """Paged multi-head latent attention. Every buffer is allocated here, none later.

    ``plan``, ``append`` and ``attend`` launch kernels on the current stream and never wait for the
    device, so they can be captured in a CUDA graph. They allocate nothing but the answers of an
    ``attend`` that is given no tensors for them. A replay reads lengths, tables and masks from the
    same tensors again. Under ``torch.compile`` they are the ops of
    :mod:`paged_mla_optimized.ops`.

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

    Raises
    ------
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
    ) -> None:
        self._core = core = Core(config, device, variant, workspace)
        self.config, self.device = config, core.device
        self._handle = ops.register(core)
        self._max_query_len: int | None = None  # of the planned step
        self._is_chosen = True  # its kernels; not behind a compiled plan
        total = sum(buffer.nbytes for buffer in self.memory())
        LOGGER.info("%s on %s: %s, %s bytes", config, core.device, core.variants, f"{total:,}")

    @property
    def workspace(self) -> torch.Tensor:
        """Scratch memory, float32 [n], that another instance may share."""
        return self._core.workspace.memory

    @property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Prefix sums of the planned step's ``seq_lens``, int32 [B + 1].

        Sums past 2 ** 31 - 1, of rows that share their blocks, stay there: int32 is what engines
        take, and :meth:`gather_context` writes no more lines.
        """
        return self._core.plan.planned("key_starts", self._core.plan.num_rows + 1)

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

    def plan(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        max_query_len: int | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe a step. Two launches; lengths are read on the device only.

        A row that S-2 does not allow is treated as padding, whatever the tensors hold; the table
        in ``docs/contract.md`` lists every case.

        Parameters
        ----------
        cu_seqlens_q : int32 [B + 1]
            Prefix sums of query lengths; tokens at or past the last entry are padding (S-6).
        seq_lens : int32 [B]
            Tokens of each row, this step's included; 0 marks a padded row (S-2). With the mask
            "non_causal" a row may have fewer keys than queries: the queries in front of its first
            position have no slot.
        block_table : int32 [B, M], or RequestMap
            Read again by ``attend``: keep it unchanged until then. Entries past a row's last
            block are never read (S-9). From a request map, :attr:`block_table` is built.
        num_tokens : int
            T, the tokens of the step's tensors, padded ones included.
        max_query_len : int or None
            The longest query of any row, >= 1, as far as the host knows: the step's kernel is
            chosen for it. A longer row is right too, only slower. ``None`` takes a step with no
            more tokens than rows for decode, and others for the longest rows of the capacities.
            With ``deterministic`` it chooses one kernel for all steps, since a row has the same
            bits only in steps of one kernel (S-20).
        mask : bool [..] or uint8 [T, W], or None
            The draft trees, spelled as the config says (S-14). What a flat one holds past the
            rows' own elements is never read.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or capacity is wrong, or `max_query_len`. Values of
            tensors are not looked at: :meth:`check` does that.
        """
        core, plan = self._core, self._core.plan
        if not torch.compiler.is_compiling():
            core.fill(
                plan,
                cu_seqlens_q,
                seq_lens,
                block_table,
                num_tokens=num_tokens,
                max_query_len=max_query_len,
                mask=mask,
            )
            self._max_query_len, self._is_chosen = max_query_len, True
            return
        ids, table = None, block_table
        if isinstance(block_table, RequestMap):
            ids, table = block_table.request_ids, block_table.req_to_token
        ops.plan(
            plan.state,
            cu_seqlens_q,
            seq_lens,
            table,
            ids,
            mask,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            handle=self._handle,
        )
        # Chosen here, kernels would make a graph for each `max_query_len`.
        self._max_query_len, self._is_chosen = max_query_len, False
        plan.num_rows, plan.num_tokens = seq_lens.shape[0], num_tokens
        plan.given_table = None if isinstance(block_table, RequestMap) else block_table

    def host_step(self) -> HostStep:
        """Return what the host knows of the planned step, for :meth:`resume`."""
        self._choose()
        plan = self._core.plan
        return HostStep(
            plan,
            plan.num_rows,
            plan.num_tokens,
            plan.query_len,
            plan.choice,
            plan.given_table,
            self._max_query_len,
        )

    def resume(self, step: HostStep) -> None:
        """Take a step for the planned one: behind a replay of the graph that planned it.

        A replay rewrites the buffers on the device, and the host knows nothing of it: without this
        call :attr:`positions`, :attr:`slot_mapping`, :attr:`cu_seqlens_k`, :attr:`block_table`,
        ``append``, ``attend`` and ``gather_context`` outside the graph take the sizes and the table
        of the step that :meth:`plan` was called for last. ``GraphedStep`` calls it.

        Parameters
        ----------
        step : HostStep
            What :meth:`host_step` of this instance returned when the graph was captured.

        Raises
        ------
        InvalidArgument
            Another instance planned the step, into buffers of its own; or it is none.
        """
        check_kind("step", step, HostStep)
        plan = self._core.plan
        if step.plan is not plan:
            allowed = "what host_step() of this instance returned"
            raise InvalidArgument("step", "a step that another instance planned", allowed)
        plan.num_rows, plan.num_tokens, plan.query_len, plan.choice = step[1:5]
        plan.given_table = step.given_table
        self._max_query_len, self._is_chosen = step.max_query_len, True

    def _choose(self) -> None:
        """Choose the kernels of a step that a compiled function planned."""
        if not self._is_chosen:
            core, plan = self._core, self._core.plan
            core.choose(plan, plan.num_rows, plan.num_tokens, self._max_query_len)
            self._is_chosen = True

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Write the planned step's latents and keys to the cache (S-10, S-12).

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

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong.
        """
        core = self._core
        if torch.compiler.is_compiling():
            cache = as_cache(core.config.cache_format, cache)
            ops.append(
                core.plan.state,
                ckv,
                k_pe,
                cache.latents,
                cache.scales,
                slot_mapping,
                num_tokens=core.plan.num_tokens,
                handle=self._handle,
            )
        else:
            core.check_append(cache, slot_mapping)
            core.append(core.plan, ckv, k_pe, cache, slot_mapping)

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: Cache,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every query of the planned step to the cache (S-4 to S-7).

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

        Returns
        -------
        out : dtype [T, H, R]
        lse : float32 [T, H]
            In the config's base. Queries that see nothing, and padded tokens, have (0, -inf).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong.
        """
        core, plan = self._core, self._core.plan
        check_kind("q_nope", q_nope, torch.Tensor)
        out = q_nope.new_empty(q_nope.shape) if out is None else out
        lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32) if lse is None else lse
        if not torch.compiler.is_compiling():
            self._choose()
            core.check_attend(cache)
            core.attend(plan, q_nope, q_pe, cache, out=out, lse=lse)
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
            plan.given_table,
            num_rows=plan.num_rows,
            num_tokens=plan.num_tokens,
            max_query_len=self._max_query_len,
            handle=self._handle,
        )
        return out, lse

    def quantise_queries(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, *, scale: torch.Tensor | None = None
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
        plan = self._core.plan
        if not torch.compiler.is_compiling():
            return self._core.quantise_queries(plan, q_nope, q_pe, scale)
        num_tokens, handle = plan.num_tokens, self._handle
        found: tuple[torch.Tensor, torch.Tensor] = ops.quantise_queries(
            plan.state, q_nope, q_pe, scale, num_tokens=num_tokens, handle=handle
        )
        return found

    def gather_context(self, cache: Cache, ckv: torch.Tensor, k_pe: torch.Tensor) -> None:
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

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or last stride is wrong.
        """
        self._core.check_attend(cache)
        self._core.gather(Spans.whole(self._core.plan), cache, ckv, k_pe)

    def memory(self) -> list[Buffer]:
        """Return every tensor this instance holds on its device, largest first."""
        return self._core.memory()

    def explain(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        num_tokens: int | None = None,
        max_query_len: int | None = None,
    ) -> Explanation:
        """Return which kernel, tiles, grid and splits a batch gets, and why; synchronises.

        Parameters are those of :meth:`plan`; without `num_tokens` the step has no padding.
        """
        core = self._core
        checks.check_tensor("seq_lens", seq_lens, (None,), torch.int32, None)
        num_rows = seq_lens.shape[0]
        checks.check_tensor("cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32, None)
        starts = cu_seqlens_q.tolist()
        source = "cu_seqlens_q" if num_tokens is None else "num_tokens"
        tokens = starts[-1] if num_tokens is None else integer("num_tokens", num_tokens)
        checks.check_capacity(core.config, num_rows, tokens, tokens=source)
        plan = copy.copy(core.plan)
        core.choose(plan, num_rows, tokens, max_query_len)
        return explain(
            core.config,
            core.variants[plan.choice],
            num_sms=core.facts.num_sms,
            demand=core.demand,
            query_len=plan.query_len,
            starts=starts,
            seq_lens=seq_lens.tolist(),
            num_tokens=tokens,
        )

    def check(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        num_blocks: int | None = None,
        cache: Cache | None = None,
        max_query_len: int | None = None,
        mask: torch.Tensor | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Hold the *values* of a step against the rules; for debugging, since it synchronises.

        Call it before the step's tokens are appended. ``PAGED_MLA_CHECK=1`` has every eager
        ``plan`` call it.

        Parameters
        ----------
        cu_seqlens_q, seq_lens, block_table, num_tokens, max_query_len, mask
            As for :meth:`plan`.
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
        self._core.check(
            cu_seqlens_q,
            seq_lens,
            block_table,
            num_tokens=num_tokens,
            mask=mask,
            slot_mapping=slot_mapping,
            num_blocks=num_blocks,
            cache=cache,
        )
        step_query_len(self.config, seq_lens.shape[0], num_tokens, max_query_len)

    def unchecked(self) -> AbstractContextManager[None]:
        """Leave steps within unchecked, whatever ``PAGED_MLA_CHECK`` says: those of a warm-up."""
        return self._core.switch.off()

    def writes_elsewhere(self) -> None:
        """Say that the engine writes the step's tokens itself, to slots that are not the plan's.

        ``PAGED_MLA_CHECK`` then leaves the plan's slots alone.
        """
        self._core.writes_planned_slots = False
