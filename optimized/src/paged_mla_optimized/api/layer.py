"""One attention layer between its projections, with absorbed and materialized rows in one step."""

from __future__ import annotations

from dataclasses import replace

import torch

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.api.materialized import Materialized, MaterializedPlan
from paged_mla_optimized.api.planned import PlannedStep, Planner, explained
from paged_mla_optimized.api.warm_up import warm_up
from paged_mla_optimized.config.arguments import check_kind, integer
from paged_mla_optimized.config.layer import LayerConfig
from paged_mla_optimized.planning.choice import step_query_len
from paged_mla_optimized.planning.explain import Buffer, LayerExplanation, buffers_of
from paged_mla_optimized.planning.layer_cost import Forms, Prices
from paged_mla_optimized.planning.plan import HostPlan, Plan
from paged_mla_optimized.runtime.layouts import known_layouts, layout_of
from paged_mla_optimized.runtime.log import LOGGER
from paged_mla_optimized.tensors.checks import (
    answers,
    check_planned,
    check_step,
    check_tensor,
    check_token_stride,
)
from paged_mla_optimized.tensors.head_weights import HeadWeights
from paged_mla_optimized.tensors.host_lengths import HostLengths
from paged_mla_optimized.tensors.latent_cache import Cache, as_cache, named_tensors
from paged_mla_optimized.tensors.overlap import check_apart
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep, RequestMap
from paged_mla_shared.errors import InvalidArgument

_SLOW = 1.25  # warn if the order of rows makes a step this many times slower than the best order


class PlannedLayerStep(PlannedStep):
    """A planned step of layers; it stores whether each row is absorbed or materialized.

    Attributes
    ----------
    absorbed_rows : int
        Number of leading rows that are absorbed; all other rows are materialized.
    absorbed : Plan
        Buffers that describe the absorbed rows.
    materialized : MaterializedPlan or None
        Buffers that describe the materialized rows; ``None`` if there are none.
    """

    def __init__(
        self,
        plan: Plan,
        absorbed_rows: int,
        absorbed: Plan,
        materialized: MaterializedPlan | None = None,
    ) -> None:
        super().__init__(plan)
        self.absorbed_rows, self.absorbed, self.materialized = absorbed_rows, absorbed, materialized
        self._absorbed_host = absorbed.host

    @property
    def absorbed_tokens(self) -> int:
        """Tokens of the absorbed rows; with padding if the step has no materialized rows."""
        return self.absorbed.num_tokens

    def renew(self) -> Plan:
        """Make this step the latest step of its buffers again, and return the plan's buffers."""
        self.absorbed.host = self._absorbed_host
        if self.materialized is not None:
            self.materialized.renew()
        return super().renew()


class MlaLayer(Planner):
    """Attention from a layer's queries and latents to values; one object for all layers of a model.

    A row is attended to in one of two forms. An absorbed row is attended to over the cached
    latents. For a materialized row, the cached tokens are gathered and projected to keys and
    values of every head, in key chunks that fit the workspace. Both forms read what the cache holds
    after ``append``. Therefore a token has the same output whether its row is prefilled at once, in
    chunks or after a prefix hit (S-19, S-21).

    Call ``plan`` once per step, and ``append`` and ``attend`` once per layer; none waits for the
    device. All rows of a step without lengths on the host are absorbed. A CUDA graph of such a step
    can be replayed with other lengths. A CUDA graph of a step with lengths on the host can be
    replayed with the same lengths only.

    Parameters
    ----------
    config : LayerConfig
    device : str or torch.device
        A CUDA device, or a CPU with Triton's interpreter (``TRITON_INTERPRET=1``).
    workspace : float32 [n] or None
        The :attr:`workspace` of another instance that runs on the same stream, at least as large
        as this instance needs. ``None`` allocates a workspace. Its contents are used only during a
        call.
    steps_in_flight : int
        Number of planned steps that are valid at the same time, >= 1; each has separate buffers.
        All steps run on one stream.

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
        config: LayerConfig,
        device: str | torch.device = "cuda",
        *,
        workspace: torch.Tensor | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        check_kind("config", config, LayerConfig)
        self.config = config
        self._core = core = Core(
            config.attention, device, workspace=workspace, steps_in_flight=steps_in_flight
        )
        self.device = core.device
        self._leading = [core.new_plan() for _ in core.plans]  # for absorbed rows of mixed steps
        self._prices = Prices.of(config)
        self._has_warned_of_order = False
        self.materialized = Materialized(config, core)
        """Attention of the materialized rows."""
        self._first_parts = [self.materialized.new_first_part() for _ in core.plans]
        self._apart = known_layouts()

    @property
    def _own_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that no tensor of a caller may overlap, by name."""
        leading = {f"the buffers of leading plan {n}": p.state for n, p in enumerate(self._leading)}
        chunks = {
            f"the {name} of part {n}": tensor
            for n, part in enumerate(self._first_parts)
            for name, tensor in part.tensors.items()
        }
        own = {"workspace": self.workspace} | self._core.own_buffers
        return own | leading | chunks | self.materialized.tensors

    @property
    def planned(self) -> PlannedLayerStep:
        """The latest planned step."""
        plan = self._core.plan
        latest: PlannedLayerStep | None = plan.latest
        return PlannedLayerStep(plan, 0, plan) if latest is None else latest

    @property
    def absorbed_rows(self) -> int:
        """Number of leading rows of the latest step that are absorbed."""
        return self.planned.absorbed_rows

    def warm_up(
        self, cache: Cache, weights: HeadWeights, request_map: RequestMap | None = None
    ) -> None:
        """Compile every kernel that a step can launch, as :meth:`PagedMla.warm_up` does.

        With a causal mask, this method also plans a step of materialized rows of one token each,
        and attends to the contents of the cache, without a write to it. That step reuses the
        buffers of the oldest planned step and becomes the latest step: call :meth:`plan` again.

        Parameters
        ----------
        cache, request_map
            As for :meth:`PagedMla.warm_up`.
        weights : HeadWeights
            The weights of any layer.

        Raises
        ------
        InvalidArgument
            The errors of :meth:`attend` and :meth:`plan`.
        """
        warm_up(self._core, cache, request_map)
        config, attention = self.config, self.config.attention
        if attention.mask != "causal":
            return
        keys = min(config.room + 1, attention.max_model_len)
        rows = min(-(-(config.room + 1) // keys), attention.max_rows, attention.max_query_tokens)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        q_nope, q_pe = (
            torch.zeros(
                (rows, attention.num_heads, width), dtype=attention.dtype, device=starts.device
            )
            for width in (config.qk_nope_head_dim, attention.qk_rope_head_dim)
        )
        with self._core.switch.off():  # rows share one block
            step = MlaStep(
                starts,
                torch.full_like(starts[:rows], keys),
                starts.new_zeros((rows, -(-keys // attention.block_size))),
                num_tokens=rows,
                query_lens=[1] * rows,
                max_seq_lens=[keys] * rows,
            )
            self.plan(step, absorbed_rows=0)
            self.attend(q_nope, q_pe, cache, weights)

    def plan(self, step: MlaStep, *, absorbed_rows: int | None = None) -> PlannedLayerStep:
        """Plan a step; lengths on the device are read there only.

        Parameters
        ----------
        step : MlaStep
            If ``query_lens`` is ``None``, all rows are absorbed. Otherwise ``max_seq_lens`` is
            required too. Their sum over the materialized rows bounds the keys that are read: keys
            of the last rows beyond this sum are left out.
        absorbed_rows : int or None
            Number of leading rows that are absorbed; all other rows are materialized. It must be
            ``None`` for a step without ``query_lens``, and ``None`` or all rows if the mask is not
            causal. ``None`` chooses by the cost model of ``planning/layer_cost.py``. A step is
            fastest with rows of few query tokens first. Any other order gives correct outputs, and
            logs a warning once if it is much slower.

        Returns
        -------
        PlannedLayerStep
            The planned step, for ``append`` and ``attend``. Without it, they use the latest step.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or capacity is wrong, or the lengths on the host
            contradict each other. Values of tensors on the device are not checked.
        """
        core, plan = self._core, self._core.next_plan
        number = core.plans.index(plan)
        host = self._host_lengths(step, absorbed_rows)
        is_checked = core.switch.is_on
        if is_checked:
            core.check(step, slot_mapping=None, num_blocks=None, cache=None)
        rows, max_query_len = 0, step.max_query_len
        if host is not None:
            rows = self._choose(host, absorbed_rows)
            max_query_len = host.leading(rows).max_query_len
        core.fill(plan, step, max_query_len=max_query_len, is_checked=is_checked)
        core.use(plan)
        num_rows = plan.num_rows
        if host is None or rows == num_rows:
            return PlannedLayerStep(plan, num_rows, plan)
        tokens = host.leading(rows).num_tokens
        table = plan.block_table
        leading = self._leading[number]
        first = MlaStep(
            step.cu_seqlens_q[: rows + 1], step.seq_lens[:rows], table[:rows], num_tokens=tokens
        )
        if rows > 0:
            core.fill(leading, first, max_query_len=max_query_len, is_checked=True)
        else:
            leading.host = HostPlan()
        # Pass the plan's own lengths: the caller may change its tensors before later chunks are
        # planned.
        materialized = self.materialized.plan(
            self._first_parts[number],
            MlaStep(
                plan.token_starts[rows : num_rows + 1],
                plan.row_lens[rows:num_rows],
                table[rows:],
                num_tokens=plan.num_tokens - tokens,
            ),
            num_keys=host.keys_from(rows),
            positions=plan.positions[tokens : plan.num_tokens],
        )
        return PlannedLayerStep(plan, rows, leading, materialized)

    def _host_lengths(self, step: MlaStep, absorbed_rows: int | None) -> HostLengths | None:
        """Return the lengths on the host, which decide the form of rows; ``None`` without them."""
        check_kind("step", step, MlaStep)
        host = HostLengths.of(self.config.attention, step)
        if host is None:
            if absorbed_rows is not None:
                raise InvalidArgument("absorbed_rows", absorbed_rows, "None without query_lens")
            return None
        _ = host.known_seq_lens  # raises an error if max_seq_lens is missing
        return host

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None = None,
        *,
        planned: PlannedStep | None = None,
    ) -> None:
        """Write the latents and keys of a planned step, as :meth:`PagedMla.append` does."""
        plan = self._plan_of(planned)
        self._core.check_append(plan, cache, slot_mapping)
        self._core.append(plan, ckv, k_pe, cache, slot_mapping)

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: Cache,
        weights: HeadWeights,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        planned: PlannedLayerStep | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every query token of a planned step to the cache, which has the step's tokens.

        Parameters
        ----------
        q_nope : dtype [T, H, N]
            Not absorbed; `q_nope` and `q_pe` may be views of one tensor [T, H, N + P].
        q_pe : dtype [T, H, P]
            Unrotated if the config has a rope.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, but the last stride is 1.
        weights : HeadWeights
            The weights of the layer; any strides.
        out : dtype [T, H, V] or None
            In a step with materialized rows, the token strides of `q_nope`, `q_pe` and `out` must
            be less than 2 ** 24 elements.
        lse : float32 [T, H] or None
            Where to write the outputs. ``None`` allocates; during a graph capture, the memory
            belongs to the graph.
        planned : PlannedLayerStep or None
            A step that this instance planned; ``None`` uses the latest step.

        Returns
        -------
        out : dtype [T, H, V]
        lse : float32 [T, H]
            In the config's base. Queries without visible keys, and padded tokens, have (0, -inf).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or stride is wrong, `out` or `lse` overlaps another
            tensor, or `planned` is not valid. No output has been written then.
        """
        planned = self.planned if planned is None else planned
        check_kind("planned", planned, PlannedLayerStep)
        plan = self._plan_of(planned)
        config, core, tokens = self.config, self._core, planned.absorbed_tokens
        num_tokens = plan.num_tokens
        check_planned("attend", q_nope, num_tokens)
        lines = (num_tokens, config.attention.num_heads)
        self._check("q_nope", q_nope, (*lines, config.qk_nope_head_dim))
        self._check("q_pe", q_pe, (*lines, config.attention.qk_rope_head_dim))
        shape = (*lines, config.v_head_dim)
        self._check_weights(weights)
        read = named_tensors(as_cache(config.attention.cache_format, cache))
        read |= {"q_nope": q_nope, "q_pe": q_pe, "block_table": plan.block_table}
        read |= {"weights.w_uk": weights.w_uk, "weights.w_uv": weights.w_uv}
        given = layout_of(out, lse)
        out, lse = answers(out, lse, shape, config.attention.dtype, self.device, read=read)
        if given not in self._apart:  # checked once, since the instance's own buffers never move
            check_apart({"out": out, "lse": lse}, self._own_buffers)
            self._apart[given] = None
        if tokens < num_tokens:
            for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("out", out)):
                check_token_stride(name, tensor.stride(0))
        core.check_attend(plan, cache)
        if num_tokens == 0:
            core.checked_cache(cache)
        if tokens > 0:
            absorbed = Queries(weights.absorb(q_nope[:tokens]), q_pe[:tokens])
            latents = torch.empty_like(absorbed.nope)
            core.attend(planned.absorbed, absorbed, cache, Answer(latents, lse[:tokens]))
            weights.project(latents, out=out[:tokens])
        if tokens < num_tokens:
            answer = Answer(out[tokens:], lse[tokens:])
            queries = Queries(q_nope[tokens:], q_pe[tokens:])
            materialized = planned.materialized
            assert materialized is not None
            self.materialized.attend(materialized, queries, cache, weights, answer)
            if config.attention.lse_base == "2":
                answer.scale_lse(config.attention.lse_unit)
        return out, lse

    def check(
        self,
        step: MlaStep,
        *,
        absorbed_rows: int | None = None,
        num_blocks: int | None = None,
        cache: Cache | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Check the *values* of a step against the rules; for debugging, since it synchronizes.

        Parameters are those of :meth:`plan` and of :meth:`PagedMla.check`. Lengths on the host are
        compared with those on the device. They differ if the host is a step ahead of the device.

        Raises
        ------
        InvalidArgument
            An argument breaks a rule; the error names the argument.
        """
        host = self._host_lengths(step, absorbed_rows)
        if host is not None:
            self._choose(host, absorbed_rows)
        self._core.check(step, slot_mapping=slot_mapping, num_blocks=num_blocks, cache=cache)
        attention = self.config.attention
        step_query_len(attention, step.num_rows, step.num_tokens, step.max_query_len)

    def explain(self, step: MlaStep, *, absorbed_rows: int | None = None) -> LayerExplanation:
        """Return which rows are absorbed and how both forms run; synchronizes.

        Parameters are those of :meth:`plan`.

        Raises
        ------
        InvalidArgument
            The errors of :meth:`plan`.
        """
        host = self._host_lengths(step, absorbed_rows)
        check_step(self.config.attention, step, self.device)
        if host is None:
            return LayerExplanation(explained(self._core, step, step.max_query_len), step.num_rows)
        rows = self._choose(host, absorbed_rows)
        absorbed = host.leading(rows)
        leading = replace(
            step,
            cu_seqlens_q=step.cu_seqlens_q[: rows + 1],
            seq_lens=step.seq_lens[:rows],
            num_tokens=step.num_tokens if rows == step.num_rows else absorbed.num_tokens,
        )
        attention = None
        if rows > 0:
            attention = explained(self._core, leading, absorbed.max_query_len)
        num_keys = host.keys_from(rows)
        return LayerExplanation(
            attention,
            absorbed_rows=rows,
            materialized_rows=step.num_rows - rows,
            materialized_keys=num_keys,
            parts=-(-num_keys // max(self.config.room, 1)),  # 0 where no row is materialized
        )

    def memory(self) -> list[Buffer]:
        """Return every tensor that this instance has on its device, largest first."""
        tensors = self.materialized.tensors
        for number, plan in enumerate(self._leading):
            tensors |= {f"leading {name} {number}": buffer for name, buffer in plan.buffers.items()}
        for number, part in enumerate(self._first_parts):
            tensors |= {f"materialized {name} {number}": t for name, t in part.tensors.items()}
        return sorted([*super().memory(), *buffers_of(tensors)], key=lambda one: -one.nbytes)

    def _choose(self, host: HostLengths, absorbed: int | None) -> int:
        """Return the number of leading rows that are absorbed."""
        query_lens, num_rows = host.query_lens, len(host.query_lens)
        mask = self.config.attention.mask
        absorbed = None if absorbed is None else integer("absorbed_rows", absorbed)
        if mask != "causal" and absorbed not in {None, num_rows}:
            allowed = f"{num_rows} (all rows) or None, since the mask is {mask}"
            raise InvalidArgument("absorbed_rows", absorbed, allowed)
        if mask != "causal":
            return num_rows
        if absorbed is None:
            forms = Forms(self._prices, query_lens, host.known_seq_lens)
            rows = forms.absorbed_rows()
            if not self._has_warned_of_order and (query_lens[1:] < query_lens[:-1]).any():
                self._warn_of_order(forms.slowdown(rows))
            return rows
        if not 0 <= absorbed <= num_rows:
            raise InvalidArgument("absorbed_rows", absorbed, f"0 to {num_rows} rows, or None")
        return absorbed

    def _warn_of_order(self, times: float) -> None:
        """Warn once that another order of rows is faster if the slowdown `times` is large."""
        if times > _SLOW:
            self._has_warned_of_order = True
            LOGGER.warning(
                "this step takes about %.1f times as long as with each row in its better form; "
                "put rows with few query tokens first",
                times,
            )

    def _check_weights(self, weights: HeadWeights) -> None:
        check_kind("weights", weights, HeadWeights)
        attention, config = self.config.attention, self.config
        for name, tensor, width in (
            ("weights.w_uk", weights.w_uk, config.qk_nope_head_dim),
            ("weights.w_uv", weights.w_uv, config.v_head_dim),
        ):
            shape = (attention.num_heads, width, attention.kv_lora_rank)
            check_tensor(name, tensor, shape, attention.dtype, self.device)

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        dtype = self.config.attention.dtype
        check_tensor(name, tensor, shape, dtype, self.device, unit_stride=True)
