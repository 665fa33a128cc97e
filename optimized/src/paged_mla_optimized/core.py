"""Checks and launches behind the API: what methods, ops and adapters share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from paged_mla_optimized import checks
from paged_mla_optimized.apart import check_apart, check_places
from paged_mla_optimized.cache import Cache, LatentCache, as_cache, named_tensors
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.given import check_at_least, check_kind, device_of, integer
from paged_mla_optimized.inspect.check import check_appended, check_attended, check_step_values
from paged_mla_optimized.inspect.explain import Buffer
from paged_mla_optimized.launchers.append import Append
from paged_mla_optimized.launchers.attend import Attention, Workspace
from paged_mla_optimized.launchers.gather import Gather, Spans
from paged_mla_optimized.launchers.quantise import Quantise, QuantiseQueries
from paged_mla_optimized.launchers.rotary import rope_tables
from paged_mla_optimized.launchers.rotate import RotateQueries
from paged_mla_optimized.planning.choice import demand_of, most_query_len, step_query_len
from paged_mla_optimized.planning.families import (
    TILE_FP8,
    AttendVariant,
    variants_by_query_len,
)
from paged_mla_optimized.planning.plan import Plan, PlanKernels
from paged_mla_optimized.runtime.bounded import Bounded
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.runtime.device import check_computes, device_facts
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_optimized.tables import RequestMap
from paged_mla_shared.errors import InvalidArgument

_MAX_KEYS = 2**31 - 1  # what int32 prefix sums tell apart
MAX_LAYOUTS = 4096
"""Layouts and addresses of arguments that are known to be right before all are forgotten."""


class Core:
    """Every buffer and kernel of one :class:`~paged_mla_optimized.api.PagedMla`.

    Methods that take a `plan` work on that one: :attr:`plan`, or one whose buffers a compiler
    moved (``Plan.on``). Errors are those of the API.
    """

    def __init__(
        self,
        config: MlaConfig,
        device: str | torch.device,
        variant: AttendVariant | None,
        workspace: torch.Tensor | None,
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
        self._choices = [self.variants.index(v) for v in served]  # by query length, from 1
        num_sms = self.facts.num_sms
        self.plan = self.new_plan()
        self.workspace = Workspace(config, self.variants, num_sms, self.device, workspace)
        self._kernels = [PlanKernels(config, v, num_sms) for v in self.variants]
        self.quantise = None
        if any(v.family == TILE_FP8 for v in self.variants):
            self.quantise = QuantiseQueries(config, self.facts.arch, self.tables)
        self.rotate = None
        if config.rope is not None:
            self.rotate = RotateQueries(config, self.facts.arch, self.tables)
        self._attentions = [
            Attention(
                config, v, self.facts, self.workspace, quantise=self.quantise, rotate=self.rotate
            )
            for v in self.variants
        ]
        self._append = Append(config, self.facts.arch, self.tables)
        self._gather = Gather(config, self.facts.arch)
        self._quantise = Quantise(config, self.facts.arch, self.tables)
        self._has_inline_scales = config.stored.inline_scales > 0
        self.switch = CheckSwitch(self.device)
        self.writes_planned_slots = True
        """Whether tokens go to the plan's slots, or to others that are named for the same rows."""
        # Layouts and addresses that passed: looking again costs host time.
        self._checked: Bounded[Hashable, None] = Bounded(MAX_LAYOUTS)

    def new_plan(self) -> Plan:
        """Return buffers for one more step; those of :attr:`plan` are the first."""
        return Plan(self.config, self.variants, self.facts.num_sms, self.device)

    @property
    def attention(self) -> Attention:
        """The attention launches of the planned step."""
        return self._attentions[self.plan.choice]

    def choose(self, plan: Plan, num_rows: int, num_tokens: int, max_query_len: int | None) -> None:
        """Leave in `plan` which kernels its step gets."""
        plan.query_len = step_query_len(self.config, num_rows, num_tokens, max_query_len)
        plan.choice = self._choices[min(plan.query_len, len(self._choices)) - 1]

    def query_lens(self) -> list[int]:
        """Return for each variant the shortest query length that gets it."""
        return [self._choices.index(n) + 1 for n in range(len(self.variants))]

    def append_steps(self) -> list[tuple[int, int]]:
        """Return a step for each append kernel: tokens, and rows, none if its slots are named."""
        return self._append.steps()

    def fill(
        self,
        plan: Plan,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        max_query_len: int | None,
        mask: torch.Tensor | None,
        is_checked: bool = False,
    ) -> None:
        """Check a step, unless it is part of one that was, and describe it in `plan`."""
        num_tokens = integer("num_tokens", num_tokens)
        if not is_checked:
            step = (cu_seqlens_q, seq_lens, block_table, mask)
            checks.check_step(self.config, *step, num_tokens=num_tokens, device=self.device)
            if self.switch.is_on:
                described = (cu_seqlens_q, seq_lens, block_table)
                self.check_values(*described, num_tokens=num_tokens, mask=mask)
        lengths = {"cu_seqlens_q": cu_seqlens_q, "seq_lens": seq_lens, "mask": mask}
        if isinstance(block_table, RequestMap):
            lengths |= vars(block_table)
        # A table is read, not copied, and may be the one that an earlier plan built.
        check_apart({"the plan's own buffers": plan.state}, lengths)
        self.choose(plan, seq_lens.shape[0], num_tokens, max_query_len)
        kernels = self._kernels[plan.choice]
        plan.fill(kernels, cu_seqlens_q, seq_lens, block_table, num_tokens=num_tokens, mask=mask)

    def check(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        mask: torch.Tensor | None,
        slot_mapping: torch.Tensor | None,
        num_blocks: int | None,
        cache: Cache | None,
    ) -> None:
        """Hold a step, its values included, against the rules; synchronises."""
        num_tokens = integer("num_tokens", num_tokens)
        step = (cu_seqlens_q, seq_lens, block_table, mask)
        checks.check_step(self.config, *step, num_tokens=num_tokens, device=self.device)
        if slot_mapping is not None:
            checks.check_tensor(
                "slot_mapping", slot_mapping, (num_tokens,), torch.int64, self.device
            )
        self.check_values(
            cu_seqlens_q,
            seq_lens,
            block_table,
            num_tokens=num_tokens,
            mask=mask,
            slot_mapping=slot_mapping,
            num_blocks=num_blocks,
            cache=None if cache is None else self.checked_cache(cache),
        )

    def check_values(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        mask: torch.Tensor | None,
        slot_mapping: torch.Tensor | None = None,
        num_blocks: int | None = None,
        cache: LatentCache | None = None,
    ) -> None:
        """Hold the values of a step whose shapes are right against the rules."""
        if slot_mapping is None and not self.writes_planned_slots:
            slot_mapping = torch.full((num_tokens,), -1, dtype=torch.int64)
        check_step_values(
            self.config,
            cu_seqlens_q,
            seq_lens,
            block_table,
            num_tokens=num_tokens,
            mask=mask,
            slot_mapping=slot_mapping,
            num_blocks=blocks_of_cache(num_blocks, cache),
            cache=cache,
        )

    def check_append(self, cache: Cache, slot_mapping: torch.Tensor | None) -> None:
        """With ``PAGED_MLA_CHECK``, hold the planned step's slots and cached scales to rules."""
        if self.switch.is_on:
            cache = self.checked_cache(cache)
            step = (self.config, self.plan, cache, slot_mapping)
            check_appended(*step, writes_planned_slots=self.writes_planned_slots)

    def check_attend(self, cache: Cache) -> None:
        """With ``PAGED_MLA_CHECK``, hold the blocks and scales that the planned step reads."""
        if self.switch.is_on:
            check_attended(self.config, self.plan, self.checked_cache(cache))

    def checked_cache(self, cache: Cache) -> LatentCache:
        """Return a cache as an object, once its shape and dtype are right."""
        cache = self._as_cache(cache)
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
        """Check and write the latents of the step in `plan`."""
        config, device, num_tokens = self.config, self.device, plan.num_tokens
        cache = self._as_cache(cache)
        planned_rows = plan.num_rows if slot_mapping is None else 0
        if slot_mapping is None:
            slot_mapping = plan.slots
        layout = (num_tokens, _layout(ckv, k_pe, cache.latents, cache.scales, slot_mapping))
        if layout not in self._checked:
            checks.check_planned("append", ckv, num_tokens)
            checks.check_latents(config, ckv, k_pe, num_tokens, device)
            checks.check_cache(config, cache, device)
            checks.check_written_cache(cache.latents, cache.scales)
            checks.check_tensor("slot_mapping", slot_mapping, (num_tokens,), torch.int64, device)
            latents = {"ckv": ckv, "k_pe": k_pe, "slot_mapping": slot_mapping}
            check_apart(named_tensors(cache), latents)
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
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: Cache,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Check and attend the queries of the step in `plan`."""
        config, device, num_tokens = self.config, self.device, plan.num_tokens
        cache = self._as_cache(cache)
        table = plan.block_table
        layout = (num_tokens, _layout(q_nope, q_pe, cache.latents, cache.scales, table, out, lse))
        if layout not in self._checked:
            checks.check_planned("attend", q_nope, num_tokens)
            checks.check_queries(config, q_nope, q_pe, num_tokens, device)
            checks.check_cache(config, cache, device)
            shape = (num_tokens, config.num_heads, config.kv_lora_rank)
            read = {"q_nope": q_nope, "q_pe": q_pe, "block_table": table} | named_tensors(cache)
            checks.answers(out, lse, shape, config.dtype, device, read=read)
            check_apart({"workspace": self.workspace.memory}, {"out": out, "lse": lse} | read)
            self._checked[layout] = None
        if num_tokens > 0:
            self._attentions[plan.choice].launch(plan, q_nope, q_pe, cache, out=out, lse=lse)
            if config.lse_base == "2":
                lse.mul_(config.lse_unit)

    def quantise_queries(
        self,
        plan: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check and quantise the queries of the step in `plan`; return codes and scales."""
        config, device, num_tokens = self.config, self.device, plan.num_tokens
        checks.check_planned("quantise_queries", q_nope, num_tokens)
        checks.check_queries(config, q_nope, q_pe, num_tokens, device)
        if scale is not None:
            checks.check_tensor("scale", scale, (), torch.float32, device)
        lines = (num_tokens, config.num_heads)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        codes = torch.empty((*lines, width), dtype=torch.uint8, device=device)
        scales = torch.empty(lines, dtype=torch.float32, device=device)
        if num_tokens > 0:
            self._quantise.launch(
                q_nope, q_pe, codes, scales, positions=plan.positions, scale=scale
            )
        return codes.view(torch.float8_e4m3fn), scales

    def gather(self, spans: Spans, cache: Cache, ckv: torch.Tensor, k_pe: torch.Tensor) -> None:
        """Check and read cached tokens of rows."""
        cache = self._as_cache(cache)
        layout = _layout(ckv, k_pe, cache.latents, cache.scales, spans.block_table)
        if layout not in self._checked:
            checks.check_latents(self.config, ckv, k_pe, None, self.device)
            check_places(ckv=ckv, k_pe=k_pe)
            if ckv.shape[0] > _MAX_KEYS:
                raise InvalidArgument("ckv", f"{ckv.shape[0]} lines", f"at most {_MAX_KEYS}")
            checks.check_cache(self.config, cache, self.device)
            read = {"block_table": spans.block_table} | named_tensors(cache)
            check_apart({"ckv": ckv, "k_pe": k_pe}, read)
            self._checked[layout] = None
        if ckv.shape[0] > 0 and len(spans.block_table) > 0:
            self._gather.launch(spans, cache, ckv=ckv, k_pe=k_pe)

    def _as_cache(self, cache: Cache) -> LatentCache:
        """Return `cache` as an object; its address is no part of a layout."""
        cache = as_cache(self.config.cache_format, cache)
        if self._has_inline_scales:
            checks.check_address(cache)
        return cache

    def memory(self) -> list[Buffer]:
        """Return every tensor held on the device, largest first."""
        tensors = self.plan.buffers | {
            "workspace": self.workspace.memory,
            "cos": self.tables[0],
            "sin": self.tables[1],
        }
        if self.rotate is not None:
            tensors["q_pe"] = self.rotate.q_pe
        if self.quantise is not None:
            tensors |= {"q_codes": self.quantise.codes, "q_scales": self.quantise.scales}
        buffers = [
            Buffer(name=name, shape=tuple(t.shape), dtype=t.dtype, nbytes=t.nbytes)
            for name, t in tensors.items()
        ]
        return sorted(buffers, key=lambda buffer: -buffer.nbytes)


def blocks_of_cache(num_blocks: int | None, cache: LatentCache | None) -> int | None:
    """Return how many blocks a cache has, by its number or itself; ``None`` if neither is known.

    Raises
    ------
    InvalidArgument
        Fewer than one, or both, and they differ.
    """
    if num_blocks is not None:
        check_at_least(1, num_blocks=num_blocks)
    if cache is None:
        return num_blocks
    blocks = cache.latents.shape[0]
    if num_blocks not in {None, blocks}:
        raise InvalidArgument("num_blocks", num_blocks, f"{blocks}, as the cache has, or None")
    return blocks


class HostStep(NamedTuple):
    """What the host knows of a planned step; all else lies on the device."""

    plan: Plan
    num_rows: int
    num_tokens: int
    query_len: int
    choice: int
    given_table: torch.Tensor | None
    max_query_len: int | None


class PlannedStep(Uncopied):
    """What can be read of the step that was planned last; its buffers are a :class:`Core`'s.

    In a compiled function they are copies.
    """

    _core: Core

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the planned step (S-3), int64 [T]; 0 for padding."""
        return self._core.plan.planned("positions", self._core.plan.num_tokens)

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of the planned step (S-1), int64 [T]; -1 for padding."""
        return self._core.plan.planned("slot_mapping", self._core.plan.num_tokens)

    @property
    def block_table(self) -> torch.Tensor:
        """Block table of the planned step, int32 [B, M]: the one given, or the one built."""
        return self._core.plan.block_table


def _layout(*tensors: torch.Tensor | None) -> Hashable:
    """Return all that checks look at; nothing that has passed them if one is no tensor."""
    try:
        return tuple(
            [
                None
                if t is None
                else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t.is_neg())
                for t in tensors
            ]
        )
    except (AttributeError, TypeError, RuntimeError):  # sparse tensors have no address
        return None
