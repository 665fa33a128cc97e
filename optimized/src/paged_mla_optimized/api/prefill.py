"""Attention of whole prompts to materialized keys: plan once per step, attend once per layer."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.arguments import (
    check_at_least,
    check_kind,
    device_of,
    integer,
)
from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.prefill.hopper import HopperPrefill
from paged_mla_optimized.operations.prefill.portable import (
    Heads,
    PortablePrefill,
    PrefillPlan,
)
from paged_mla_optimized.planning.prefill import is_for_hopper, prefill_variant
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.runtime.device import check_computes, device_facts
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_optimized.tensors.checks import (
    answers,
    check_planned,
    check_tensor,
    check_token_stride,
)
from paged_mla_optimized.tensors.values.lengths import check_prefix_sums
from paged_mla_shared.errors import InvalidArgument


class Prefill(Uncopied):
    """Ragged attention to materialized keys and values; the constructor allocates every buffer.

    ``plan`` and ``attend`` launch one kernel each on the current stream and never wait for the
    device, so a CUDA graph can capture them. A graph replay reads the lengths again. Layers that
    run at the same time need separate instances.

    The bits of a row depend only on its own lengths and tensors (S-20): a query tile is not split
    over its keys, and it has queries of one row only.

    Parameters
    ----------
    config : PrefillConfig
    device : str or torch.device
        A CUDA device, or a CPU with Triton's interpreter (``TRITON_INTERPRET=1``).

    Raises
    ------
    Unsupported
        No kernel runs on `device`, or the dtype is bfloat16 in Triton's interpreter.
    """

    def __init__(self, config: PrefillConfig, device: str | torch.device = "cuda") -> None:
        check_kind("config", config, PrefillConfig)
        self.config = config
        self.device = device_of(device)
        facts = device_facts(self.device)
        check_computes(facts.arch, config.dtype)
        demand = (facts.arch, DTYPE_NAMES[config.dtype], config.head_dims)
        variant = prefill_variant(*demand)
        self._switch = CheckSwitch(self.device)
        self._planned_keys = 0  # keys of the planned step; set only while checks are on
        self._facts, self._tile_m = facts, variant.tile_m
        self._plan = self.new_plan()
        self._portable = PortablePrefill(config, variant)
        self._hopper = HopperPrefill(config, facts.num_sms) if is_for_hopper(*demand) else None

    @property
    def tiles(self) -> PrefillPlan:
        """The query tiles of the planned step."""
        return self._plan

    def new_plan(self) -> PrefillPlan:
        """Return buffers for another step, for :meth:`attend_planned`."""
        return PrefillPlan(self.config, self._tile_m, self._facts, self.device)

    def warm_up(self) -> None:
        """Compile every kernel that a step can launch, as :meth:`PagedMla.warm_up` does.

        The planned step is lost: call :meth:`plan` again. The compiled kernels are for dense
        tensors, halves of a projection, and other strides of multiples of 16 elements. Kernels for
        other strides compile at their first step.
        """
        config = self.config
        nope, rope, value = config.head_dims
        lengths = torch.zeros(2, dtype=torch.int32, device=self.device)
        q_nope, q_pe, k_nope, v = (
            torch.zeros((1, config.num_heads, n), dtype=config.dtype, device=self.device)
            for n in (nope, rope, nope, value)
        )
        self.plan(lengths, lengths, num_tokens=1)
        self.attend(q_nope, q_pe, k_nope, q_pe[:, 0], v)

    def plan(
        self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *, num_tokens: int
    ) -> None:
        """Plan a step with one kernel launch; lengths are read on the device only.

        Parameters
        ----------
        cu_seqlens_q : int32 [B + 1]
            Prefix sums of query lengths, from 0; rows may be empty. Tokens at or past the last
            entry are padding (S-6).
        cu_seqlens_k : int32 [B + 1]
            Prefix sums of key lengths, from 0. Keys past the last entry are never used.
        num_tokens : int
            T, the number of query tokens, padded tokens included.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype or device is wrong, or a capacity is exceeded. Values of
            tensors are not checked.
        """
        num_tokens = self._check_lengths(cu_seqlens_q, cu_seqlens_k, num_tokens)
        self._planned_keys = 0
        if self._switch.is_on:
            self.check(cu_seqlens_q, cu_seqlens_k, num_tokens=num_tokens)
            self._planned_keys = int(cu_seqlens_k[-1])
        self._plan.fill(cu_seqlens_q, cu_seqlens_k, num_tokens)

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        k_nope: torch.Tensor,
        k_pe: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every query token of the planned step to the keys of its row (S-4 to S-7).

        Last strides must be 1 and token strides less than 2 ** 24; other strides are free. `k_nope`
        and `v` may be halves of one projection.

        Parameters
        ----------
        q_nope : dtype [T, H, qk_nope_head_dim]
        q_pe : dtype [T, H, qk_rope_head_dim]
        k_nope : dtype [K, H, qk_nope_head_dim]
        k_pe : dtype [K, qk_rope_head_dim]
            Rotated, like `q_pe`; all heads share it.
        v : dtype [K, H, v_head_dim]
        out : dtype [T, H, v_head_dim] or None
        lse : float32 [T, H] or None
            Where to write the outputs. ``None`` allocates; during a graph capture, the memory
            belongs to the graph.

        Returns
        -------
        out : dtype [T, H, v_head_dim]
        lse : float32 [T, H]
            Natural logarithms (S-7). Queries without visible keys, and padded tokens, have
            (0, -inf).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or stride is wrong.
        """
        heads = Heads(q_nope, q_pe, k_nope, k_pe, v)
        check_planned("attend", q_nope, self._plan.num_tokens)
        self._check_heads(heads)
        if self._switch.is_on and self._planned_keys > k_nope.shape[0]:
            allowed = f"at least {self._planned_keys}, the last entry of cu_seqlens_k"
            raise InvalidArgument("k_nope", f"{k_nope.shape[0]} keys", allowed)
        return self.attend_planned(self._plan, heads, out=out, lse=lse)

    def attend_planned(
        self,
        plan: PrefillPlan,
        heads: Heads,
        *,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the queries of a step that ``plan.fill`` described; `heads` are not checked."""
        config = self.config
        shape = (plan.num_tokens, config.num_heads, config.v_head_dim)
        out, lse = answers(out, lse, shape, config.dtype, self.device, read=heads._asdict())
        check_token_stride("out", out.stride(0))
        if plan.num_tokens == 0:
            return out, lse
        descriptors = None if self._hopper is None else self._hopper.describe(heads)
        if self._hopper is None or descriptors is None:
            self._portable.launch(plan, heads, out=out, lse=lse)
        else:
            self._hopper.launch(descriptors, plan, heads, out=out, lse=lse)
        return out, lse

    def check(
        self,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *,
        num_tokens: int,
        num_keys: int | None = None,
    ) -> None:
        """Check the *values* of a step against the rules; for debugging, since it synchronizes.

        Parameters are those of :meth:`plan`. `num_keys` is the number of lines of ``k_nope``, or
        ``None`` if it is not known yet. With ``PAGED_MLA_CHECK=1`` every eager ``plan`` calls this
        method.

        Raises
        ------
        InvalidArgument
            An argument breaks a rule; the error names the argument.
        """
        num_tokens = self._check_lengths(cu_seqlens_q, cu_seqlens_k, num_tokens)
        if num_keys is not None:
            check_at_least(0, num_keys=num_keys)
        check_prefix_sums("cu_seqlens_q", cu_seqlens_q.cpu().numpy(), "num_tokens", num_tokens)
        check_prefix_sums("cu_seqlens_k", cu_seqlens_k.cpu().numpy(), "num_keys", num_keys)

    def _check_lengths(
        self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, num_tokens: int
    ) -> int:
        """Check the shapes of lengths and the capacities; return T."""
        num_tokens = integer("num_tokens", num_tokens)
        check_tensor("cu_seqlens_q", cu_seqlens_q, (None,), torch.int32, self.device)
        num_rows = cu_seqlens_q.shape[0] - 1
        if not 0 <= num_rows <= self.config.max_rows:
            allowed = f"1 to max_rows + 1 = {self.config.max_rows + 1}"
            raise InvalidArgument("cu_seqlens_q", f"{num_rows + 1} entries", allowed)
        check_tensor("cu_seqlens_k", cu_seqlens_k, (num_rows + 1,), torch.int32, self.device)
        if not 0 <= num_tokens <= self.config.max_tokens:
            allowed = f"0 to max_tokens = {self.config.max_tokens}"
            raise InvalidArgument("num_tokens", num_tokens, allowed)
        return num_tokens

    def _check_heads(self, heads: Heads) -> None:
        num_heads, (nope, rope, value) = self.config.num_heads, self.config.head_dims
        tokens = self._plan.num_tokens
        self._check_one("q_nope", heads.q_nope, (tokens, num_heads, nope))
        self._check_one("q_pe", heads.q_pe, (tokens, num_heads, rope))
        self._check_one("k_nope", heads.k_nope, (None, num_heads, nope))
        keys = heads.k_nope.shape[0]
        self._check_one("k_pe", heads.k_pe, (keys, rope))
        self._check_one("v", heads.v, (keys, num_heads, value))

    def _check_one(self, name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
        check_tensor(name, tensor, shape, self.config.dtype, self.device, unit_stride=True)
        check_token_stride(name, tensor.stride(0))
