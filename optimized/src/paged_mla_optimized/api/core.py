"""The checks and launches that the API's methods, torch ops and adapters share."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from paged_mla_optimized.api.plan_checks import check_appended, check_attended
from paged_mla_optimized.config.arguments import check_at_least, check_kind, device_of, integer
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.operations.append.launch import Append
from paged_mla_optimized.operations.attend.attention import Attention, Workspace
from paged_mla_optimized.operations.queries.quantize import Quantize, QuantizeQueries
from paged_mla_optimized.operations.queries.rope_tables import rope_tables
from paged_mla_optimized.operations.queries.rotate import RotateQueries
from paged_mla_optimized.planning.choice import demand_of, most_query_len, step_query_len
from paged_mla_optimized.planning.explain import Buffer, buffers_of
from paged_mla_optimized.planning.families import TILE_FP8, AttendVariant, variants_by_query_len
from paged_mla_optimized.planning.plan import HostPlan, Plan, PlanKernels
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.runtime.device import check_computes, device_facts
from paged_mla_optimized.runtime.layouts import known_layouts, layout_of
from paged_mla_optimized.tensors import checks
from paged_mla_optimized.tensors.host_lengths import HostLengths
from paged_mla_optimized.tensors.latent_cache import (
    Cache,
    LatentCache,
    as_cache,
    blocks_of_cache,
    named_tensors,
)
from paged_mla_optimized.tensors.overlap import check_apart
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep, RequestMap
from paged_mla_optimized.tensors.values.steps import check_step_values

R = TypeVar("R", bound="Reader")


class Reader(Protocol):
    """An operation that reads the cached rows of a step; each is in a folder of ``operations``.

    It checks its own arguments. Its `cache` is a :class:`LatentCache` of the config's format.
    """

    def __init__(self, config: MlaConfig, arch: str, device: torch.device) -> None: ...

    def warm_up(self, plan: Plan, cache: LatentCache) -> None:
        """Launch every kernel that a step can launch, for a planned step of padding."""


class Core:
    """Every buffer and kernel of one :class:`~paged_mla_optimized.api.paged_mla.PagedMla`.

    Methods with a `plan` parameter use the buffers of this plan: :attr:`plan`, or a copy whose
    buffers a compiler moved (``Plan.on``). Errors are those of the API.
    """

    def __init__(
        self,
        config: MlaConfig,
        device: str | torch.device,
        *,
        variant: AttendVariant | None = None,
        workspace: torch.Tensor | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        check_kind("config", config, MlaConfig)
        if variant is not None:
            check_kind("variant", variant, AttendVariant)
        self.config = config
        self.device = device_of(device)
        self.facts = device_facts(self.device)
        check_computes(self.facts.arch, config.dtype)
        cos, sin = torch.empty(0, device="cpu"), torch.empty(0, device="cpu")
        if config.rope is not None:
            cos, sin = rope_tables(
                config.rope, config.qk_rope_head_dim, config.max_model_len, config.dtype
            )
        self.tables = (cos.to(self.device), sin.to(self.device))
        self.demand = demand_of(config, self.facts.arch)
        served = (
            [variant] if variant else variants_by_query_len(self.demand, most_query_len(config))
        )
        self.variants = list(dict.fromkeys(served))
        self._choices = [self.variants.index(v) for v in served]  # index 0 is query length 1
        num_sms = self.facts.num_sms
        check_at_least(1, steps_in_flight=steps_in_flight)
        self.plans = tuple(self.new_plan() for _ in range(steps_in_flight))
        self._by_use = list(self.plans)  # the latest step is last
        self.workspace = Workspace(config, self.variants, num_sms, self.device, workspace)
        self._kernels = [PlanKernels(config, v, num_sms) for v in self.variants]
        self.quantize = None
        if any(v.family == TILE_FP8 for v in self.variants):
            self.quantize = QuantizeQueries(config, self.facts.arch, self.tables)
        self.rotate = None
        if config.rope is not None:
            self.rotate = RotateQueries(config, self.facts.arch, self.tables)
        self._attentions = [
            Attention(
                config, v, self.facts, self.workspace, quantize=self.quantize, rotate=self.rotate
            )
            for v in self.variants
        ]
        self._append = Append(config, self.facts.arch, self.tables)
        self._readers: dict[type[Reader], Reader] = {}
        self._quantize = Quantize(config, self.facts.arch, self.tables)
        self._has_inline_scales = config.stored.inline_scales > 0
        self.switch = CheckSwitch(self.device)
        self.writes_planned_slots = True
        """Whether tokens are written to the plan's slots, not to slots that the caller names."""
        self._checked = known_layouts()

    def new_plan(self) -> Plan:
        """Return buffers for another step."""
        return Plan(self.config, self.variants, self.facts.num_sms, self.device)

    @property
    def plan(self) -> Plan:
        """Buffers of the latest planned step."""
        return self._by_use[-1]

    @property
    def next_plan(self) -> Plan:
        """The buffers for the next step, which are those of the oldest planned step."""
        return self._by_use[0]

    def use(self, plan: Plan) -> None:
        """Make `plan` the buffers of the latest step."""
        if plan is not self.plan:
            self._by_use.remove(plan)
            self._by_use.append(plan)

    @property
    def own_buffers(self) -> dict[str, torch.Tensor]:
        """Buffers that plans fill, by name; no other call may write to them."""
        return {f"the buffers of plan {n}": plan.state for n, plan in enumerate(self.plans)}

    @property
    def attention(self) -> Attention:
        """The attention launches of the planned step."""
        return self._attentions[self.choice_of(self.plan)]

    def host_plan(self, step: MlaStep, max_query_len: int | None) -> HostPlan:
        """Return the sizes and the kernel of a step whose tensors are checked."""
        table = step.block_table
        return self.chosen(
            HostPlan(
                num_rows=step.num_rows,
                num_tokens=integer("num_tokens", step.num_tokens),
                max_query_len=max_query_len,
                given_table=None if isinstance(table, RequestMap) else table,
            )
        )

    def chosen(self, host: HostPlan) -> HostPlan:
        """Return a host plan together with the kernel choice for its step."""
        sizes = (host.num_rows, host.num_tokens, host.max_query_len)
        query_len = step_query_len(self.config, *sizes)
        choice = self._choices[min(query_len, len(self._choices)) - 1]
        return host._replace(query_len=query_len, choice=choice)

    def choice_of(self, plan: Plan) -> int:
        """Return the variant index of a planned step; after a compiled plan, it is chosen here."""
        choice = plan.host.choice
        if choice is None:
            plan.host = self.chosen(plan.host)
            choice = plan.host.choice
            assert choice is not None
        return choice

    def query_lens(self) -> list[int]:
        """Return, for each variant, the shortest query length that uses it."""
        return [self._choices.index(n) + 1 for n in range(len(self.variants))]

    def append_steps(self) -> list[tuple[int, int]]:
        """Return (tokens, rows) of a step for each append kernel; rows is 0 for named slots."""
        return self._append.steps()

    def fill(
        self, plan: Plan, step: MlaStep, *, max_query_len: int | None, is_checked: bool = False
    ) -> None:
        """Write the description of a step to `plan`, after a check unless `is_checked`."""
        if not is_checked:
            checks.check_step(self.config, step, self.device)
            if self.switch.is_on:
                self.check_values(step)
        # `plan` reads the table without a copy, and an earlier plan may have built the table.
        check_apart({"the plan's own buffers": plan.state}, step.tensors)
        host = self.host_plan(step, max_query_len)
        assert host.choice is not None
        plan.fill(self._kernels[host.choice], step, host)

    def check(
        self,
        step: MlaStep,
        *,
        slot_mapping: torch.Tensor | None,
        num_blocks: int | None,
        cache: Cache | None,
    ) -> None:
        """Check a step and its values against the rules; synchronizes."""
        checks.check_step(self.config, step, self.device)
        if slot_mapping is not None:
            shape = (integer("num_tokens", step.num_tokens),)
            checks.check_tensor("slot_mapping", slot_mapping, shape, torch.int64, self.device)
        cache = None if cache is None else self.checked_cache(cache)
        self.check_values(step, slot_mapping=slot_mapping, num_blocks=num_blocks, cache=cache)

    def check_values(
        self,
        step: MlaStep,
        *,
        slot_mapping: torch.Tensor | None = None,
        num_blocks: int | None = None,
        cache: LatentCache | None = None,
    ) -> None:
        """Check the values of a step, whose shapes are checked already, against the rules."""
        if slot_mapping is None and not self.writes_planned_slots:
            slot_mapping = torch.full((step.num_tokens,), -1, dtype=torch.int64)
        host = HostLengths.of(self.config, step)
        if host is not None:
            host.check(step)
        check_step_values(
            self.config,
            step,
            slot_mapping=slot_mapping,
            num_blocks=blocks_of_cache(num_blocks, cache),
            cache=cache,
        )

    def check_append(self, plan: Plan, cache: Cache, slot_mapping: torch.Tensor | None) -> None:
        """With ``PAGED_MLA_CHECK``, check a planned step's blocks, slots and cached scales."""
        if self.switch.is_on:
            cache = self.checked_cache(cache)
            if slot_mapping is not None:
                shape = (plan.num_tokens,)
                checks.check_tensor("slot_mapping", slot_mapping, shape, torch.int64, self.device)
            step = (self.config, plan, cache, slot_mapping)
            check_appended(*step, writes_planned_slots=self.writes_planned_slots)

    def check_attend(self, plan: Plan, cache: Cache) -> None:
        """With ``PAGED_MLA_CHECK``, check the blocks and scales that a planned step reads."""
        if self.switch.is_on:
            check_attended(self.config, plan, self.checked_cache(cache))

    def checked_cache(self, cache: Cache) -> LatentCache:
        """Return the cache as a :class:`LatentCache`, after a check of its shape and dtype."""
        cache = self.as_cache(cache)
        checks.check_cache(self.config, cache, self.device)
        return cache

    def append(
        self,
        plan: Plan,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None,
    ) -> None:
        """Check the latents of the step in `plan`, and write them to the cache."""
        config, device, num_tokens = self.config, self.device, plan.num_tokens
        cache = self.as_cache(cache)
        planned_rows = plan.num_rows if slot_mapping is None else 0
        if slot_mapping is None:
            slot_mapping = plan.slots
        layout = (num_tokens, layout_of(ckv, k_pe, cache.latents, cache.scales, slot_mapping))
        if layout not in self._checked:
            checks.check_planned("append", ckv, num_tokens)
            checks.check_latents(config, ckv, k_pe, num_tokens, device)
            checks.check_cache(config, cache, device)
            checks.check_written_cache(cache.latents, cache.scales)
            checks.check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, device)
            latents = {"ckv": ckv, "k_pe": k_pe, "slot_mapping": slot_mapping}
            check_apart(named_tensors(cache), latents | self.own_buffers)
            self._checked[layout] = None
        if num_tokens > 0:
            self._append.launch(
                ckv,
                k_pe,
                cache,
                slot_mapping=slot_mapping,
                planned_rows=planned_rows,
                positions=plan.positions,
            )

    def attend(
        self,
        plan: Plan,
        queries: Queries,
        cache: Cache,
        answer: Answer,
    ) -> None:
        """Check the queries of the step in `plan`, and attend them to the cache."""
        (q_nope, q_pe), (out, lse) = queries, answer
        config, device, num_tokens = self.config, self.device, plan.num_tokens
        cache = self.as_cache(cache)
        table = plan.block_table
        layout = (num_tokens, layout_of(q_nope, q_pe, cache.latents, cache.scales, table, out, lse))
        if layout not in self._checked:
            checks.check_planned("attend", q_nope, num_tokens)
            checks.check_queries(config, q_nope, q_pe, num_tokens, device)
            checks.check_cache(config, cache, device)
            shape = (num_tokens, config.num_heads, config.kv_lora_rank)
            read = {"q_nope": q_nope, "q_pe": q_pe, "block_table": table} | named_tensors(cache)
            own = self.own_buffers
            checks.answers(out, lse, shape, config.dtype, device, read=read | own)
            check_apart({"workspace": self.workspace.memory}, {"out": out, "lse": lse} | read)
            self._checked[layout] = None
        if num_tokens > 0:
            self._attentions[self.choice_of(plan)].launch(plan, queries, cache, answer)
            if config.lse_base == "2":
                answer.scale_lse(config.lse_unit)

    def quantize_queries(
        self,
        plan: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check and quantize the queries of the step in `plan`; return codes and scales."""
        config, device, num_tokens = self.config, self.device, plan.num_tokens
        checks.check_planned("quantize_queries", q_nope, num_tokens)
        checks.check_queries(config, q_nope, q_pe, num_tokens, device)
        if scale is not None:
            checks.check_tensor("scale", scale, (), torch.float32, device)
        lines = (num_tokens, config.num_heads)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        codes = torch.empty((*lines, width), dtype=torch.uint8, device=device)
        scales = torch.empty(lines, dtype=torch.float32, device=device)
        if num_tokens > 0:
            self._quantize.launch(
                q_nope, q_pe, codes, scales, positions=plan.positions, scale=scale
            )
        return codes.view(torch.float8_e4m3fn), scales

    def reader(self, kind: type[R]) -> R:
        """Return the operation of a class that reads cached rows; the first call makes it."""
        found = self._readers.get(kind)
        if found is None:
            found = self._readers[kind] = kind(self.config, self.facts.arch, self.device)
        assert isinstance(found, kind)
        return found

    def as_cache(self, cache: Cache) -> LatentCache:
        """Return `cache` as a :class:`LatentCache`; check its address if it has inline scales."""
        cache = as_cache(self.config.cache_format, cache)
        if self._has_inline_scales:
            checks.check_address(cache)
        return cache

    def memory(self) -> list[Buffer]:
        """Return every tensor on the device, largest first."""
        tensors = {
            name if number == 0 else f"{name} {number}": buffer
            for number, plan in enumerate(self.plans)
            for name, buffer in plan.buffers.items()
        }
        tensors |= {
            "workspace": self.workspace.memory,
            "cos": self.tables[0],
            "sin": self.tables[1],
        }
        if self.rotate is not None:
            tensors["q_pe"] = self.rotate.q_pe
        if self.quantize is not None:
            tensors |= {"q_codes": self.quantize.codes, "q_scales": self.quantize.scales}
        return buffers_of(tensors)
