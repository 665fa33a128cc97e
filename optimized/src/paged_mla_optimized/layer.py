"""One attention layer between its projections: absorbed and materialised rows in one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paged_mla_optimized.cache import Cache, as_cache, named_tensors
from paged_mla_optimized.checks import (
    answers,
    check_planned,
    check_tensor,
    check_token_stride,
)
from paged_mla_optimized.core import Core, PlannedStep
from paged_mla_optimized.given import check_kind, integer
from paged_mla_optimized.layer_config import LayerConfig
from paged_mla_optimized.materialise import Materialised
from paged_mla_optimized.planning.choice import step_query_len
from paged_mla_optimized.planning.forms import Forms, Prices
from paged_mla_optimized.runtime.log import LOGGER
from paged_mla_optimized.stepping.warm_up import warm_up
from paged_mla_optimized.tables import RequestMap
from paged_mla_optimized.told import Told, told_lens
from paged_mla_optimized.weights import HeadWeights
from paged_mla_shared.errors import InvalidArgument

_SLOW = 1.25  # times the best order of rows, which is worth a word


class MlaLayer(PlannedStep):
    """Latents and queries of heads in, values of heads out; one object for all layers of a model.

    Rows are attended to absorbed, over the cache as it is, or materialised: their cached tokens
    are gathered and projected to keys and values of every head, in parts that fit the workspace.
    Both see what the cache holds after ``append``, so a token's answer is the same whether its row
    comes in one piece, in chunks or behind a prefix hit (S-19, S-21).

    ``plan`` once a step, ``append`` and ``attend`` once a layer, all without waiting for the
    device. A step whose `plan` is told no lengths is absorbed, and may be captured in a CUDA graph
    and replayed with others; one with lengths may be captured too, and replayed with those alone.

    Parameters
    ----------
    config : LayerConfig
    device : str or torch.device
        A CUDA device; a CPU where Triton's interpreter runs (``TRITON_INTERPRET=1``).

    Raises
    ------
    Unsupported
        No kernel runs on `device`; or bfloat16 in Triton's interpreter.
    """

    def __init__(self, config: LayerConfig, device: str | torch.device = "cuda") -> None:
        check_kind("config", config, LayerConfig)
        self.config = config
        self._core = core = Core(config.attention, device, None, None)
        self.device = core.device
        self._leading = core.new_plan()  # of absorbed rows before materialised ones
        self._absorbed = core.plan  # of the planned step's absorbed rows
        self._absorbed_tokens = 0
        self.absorbed_rows = 0
        """Leading rows of the planned step that are attended to absorbed."""
        self._prices = Prices.of(config)
        self._told_of_order = False
        self.materialised = Materialised(config, core)
        """What attends to the materialised rows."""

    def warm_up(
        self, cache: Cache, weights: HeadWeights, request_map: RequestMap | None = None
    ) -> None:
        """Compile what any step launches, as :meth:`PagedMla.warm_up` does.

        Materialised rows are asked with one token each over whatever the cache holds; nothing is
        written to it. The planned step is lost: plan again.

        Parameters
        ----------
        cache, request_map
            As for :meth:`PagedMla.warm_up`.
        weights : HeadWeights
            Any layer's.

        Raises
        ------
        InvalidArgument
            As :meth:`attend` and :meth:`plan` do.
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
            self.plan(
                starts,
                torch.full_like(starts[:rows], keys),
                starts.new_zeros((rows, -(-keys // attention.block_size))),
                num_tokens=rows,
                query_lens=[1] * rows,
                max_seq_lens=[keys] * rows,
                absorbed_rows=0,
            )
            self.attend(q_nope, q_pe, cache, weights)

    def plan(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        query_lens: Sequence[int] | None = None,
        max_seq_lens: Sequence[int] | None = None,
        absorbed_rows: int | None = None,
        max_query_len: int | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe a step. Lengths on the device are read there only.

        Parameters
        ----------
        cu_seqlens_q, seq_lens, block_table, num_tokens, max_query_len, mask
            As for :meth:`PagedMla.plan`. `query_lens` tell the longest: no `max_query_len` beside
            them.
        query_lens : sequence of int [B] or None
            What ``cu_seqlens_q`` holds, as the host knows it. ``None`` absorbs all rows.
        max_seq_lens : sequence of int [B] or None
            What `seq_lens` holds, or more; given with `query_lens`. Of materialised rows so many
            keys are read in all, and the last rows' keys past them left out.
        absorbed_rows : int or None
            So many leading rows are absorbed, the others materialised; given with `query_lens`,
            and all rows where the mask is not causal. ``None`` chooses by the cost model of
            ``planning/forms.py``. Rows with few queries come first in a fast step; in another
            order the answer is as right, and what it costs is logged once.

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or capacity is wrong, or the lengths of the host do
            not fit together. Values of tensors are not looked at.
        """
        core, step = self._core, (cu_seqlens_q, seq_lens, block_table)
        num_tokens = integer("num_tokens", num_tokens)
        check_tensor("seq_lens", seq_lens, (None,), torch.int32, self.device)
        told = told_lens(
            self.config.attention,
            seq_lens.shape[0],
            num_tokens,
            query_lens=query_lens,
            max_seq_lens=max_seq_lens,
            absorbed_rows=absorbed_rows,
            max_query_len=max_query_len,
        )
        is_checked = core.switch.is_on
        if is_checked:
            self._check_values(*step, told, num_tokens=num_tokens, mask=mask)
        num_rows, rows = seq_lens.shape[0], seq_lens.shape[0]
        if told is not None:
            rows = self._choose(told, absorbed_rows)
            max_query_len = int(told.query_lens[:rows].max(initial=1))
        core.fill(
            core.plan,
            *step,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            mask=mask,
            is_checked=is_checked,
        )
        self.absorbed_rows = rows
        self._absorbed, self._absorbed_tokens = core.plan, num_tokens
        if told is None or rows == num_rows:
            return
        queries, keys = told.query_lens, told.max_seq_lens
        tokens = self._absorbed_tokens = int(queries[:rows].sum())
        table = core.plan.block_table
        if rows > 0:
            self._absorbed = self._leading
            core.fill(
                self._leading,
                cu_seqlens_q[: rows + 1],
                seq_lens[:rows],
                table[:rows],
                num_tokens=tokens,
                max_query_len=max_query_len,
                mask=None,
                is_checked=True,
            )
        live = np.where(queries[rows:] > 0, keys[rows:], 0)
        # The plan's own lengths: those of the caller may change before later parts are planned.
        self.materialised.plan(
            core.plan.token_starts[rows : num_rows + 1],
            core.plan.row_lens[rows:num_rows],
            table[rows:],
            num_tokens=num_tokens - tokens,
            num_keys=int(live.sum()),
        )

    def append(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: Cache,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Write the planned step's latents and keys, as :meth:`PagedMla.append` does."""
        self._core.check_append(cache, slot_mapping)
        self._core.append(self._core.plan, ckv, k_pe, cache, slot_mapping)

    def attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: Cache,
        weights: HeadWeights,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend every query of the planned step to the cache, which has the step's own tokens.

        Parameters
        ----------
        q_nope : dtype [T, H, N]
            Not absorbed; often a view of queries [T, H, N + P], as `q_pe` then is.
        q_pe : dtype [T, H, P]
            Unrotated if the config has a rope.
        cache : dtype [num_blocks, block_size, R + P], or LatentCache
            Any strides, the last one 1.
        weights : HeadWeights
            The layer's; any strides.
        out : dtype [T, H, V] or None
            In a step with materialised rows, a token of `q_nope`, `q_pe` and `out` is less than
            2 ** 24 elements from the next.
        lse : float32 [T, H] or None
            Where to write; ``None`` allocates, in the graph's own memory while one is captured.

        Returns
        -------
        out : dtype [T, H, V]
        lse : float32 [T, H]
            In the config's base. Queries that see nothing, and padded tokens, have (0, -inf).

        Raises
        ------
        InvalidArgument
            A tensor's shape, dtype, device or stride is wrong; nothing is written then.
        """
        config, core, tokens = self.config, self._core, self._absorbed_tokens
        check_planned("attend", q_nope, core.plan.num_tokens)
        lines = (core.plan.num_tokens, config.attention.num_heads)
        self._check("q_nope", q_nope, (*lines, config.qk_nope_head_dim))
        self._check("q_pe", q_pe, (*lines, config.attention.qk_rope_head_dim))
        shape = (*lines, config.v_head_dim)
        self._check_weights(weights)
        read = named_tensors(as_cache(config.attention.cache_format, cache))
        read |= {"q_nope": q_nope, "q_pe": q_pe, "block_table": self.block_table}
        read |= {"weights.w_uk": weights.w_uk, "weights.w_uv": weights.w_uv}
        out, lse = answers(out, lse, shape, config.attention.dtype, self.device, read=read)
        if tokens < core.plan.num_tokens:
            for name, tensor in (("q_nope", q_nope), ("q_pe", q_pe), ("out", out)):
                check_token_stride(name, tensor.stride(0))
        core.check_attend(cache)
        if tokens > 0:
            absorbed = weights.absorb(q_nope[:tokens])
            latents = torch.empty_like(absorbed)
            core.attend(
                self._absorbed, absorbed, q_pe[:tokens], cache, out=latents, lse=lse[:tokens]
            )
            weights.project(latents, out[:tokens])
        if tokens < core.plan.num_tokens:
            answer = out[tokens:], lse[tokens:]
            queries = q_nope[tokens:], q_pe[tokens:]
            self.materialised.attend(queries, cache, weights, answer)
            if config.attention.lse_base == "2":
                answer[1].mul_(config.attention.lse_unit)
        return out, lse

    def check(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        *,
        num_tokens: int,
        num_blocks: int | None = None,
        cache: Cache | None = None,
        query_lens: Sequence[int] | None = None,
        max_seq_lens: Sequence[int] | None = None,
        absorbed_rows: int | None = None,
        max_query_len: int | None = None,
        mask: torch.Tensor | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> None:
        """Hold the *values* of a step against the rules; for debugging, since it synchronises.

        Parameters are those of :meth:`plan` and of :meth:`PagedMla.check`. Lengths of the host are
        compared with those on the device: a host that runs a step ahead is told so here.

        Raises
        ------
        InvalidArgument
            Names the argument that no rule allows.
        """
        num_tokens = integer("num_tokens", num_tokens)
        check_tensor("seq_lens", seq_lens, (None,), torch.int32, self.device)
        told = told_lens(
            self.config.attention,
            seq_lens.shape[0],
            num_tokens,
            query_lens=query_lens,
            max_seq_lens=max_seq_lens,
            absorbed_rows=absorbed_rows,
            max_query_len=max_query_len,
        )
        if told is not None:
            self._choose(told, absorbed_rows)
        self._check_values(
            cu_seqlens_q,
            seq_lens,
            block_table,
            told,
            num_tokens=num_tokens,
            mask=mask,
            slot_mapping=slot_mapping,
            num_blocks=num_blocks,
            cache=cache,
        )
        step_query_len(self.config.attention, seq_lens.shape[0], num_tokens, max_query_len)

    def _check_values(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        told: Told | None,
        *,
        num_tokens: int,
        mask: torch.Tensor | None,
        slot_mapping: torch.Tensor | None = None,
        num_blocks: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        """Hold a step, and what the host was told of it, against the rules."""
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
        if told is not None:
            told.check(cu_seqlens_q.cpu().numpy(), seq_lens.cpu().numpy())

    def _choose(self, told: Told, absorbed: int | None) -> int:
        """Return how many leading rows are absorbed."""
        query_lens, num_rows = told.query_lens, len(told.query_lens)
        mask = self.config.attention.mask
        absorbed = None if absorbed is None else integer("absorbed_rows", absorbed)
        if mask != "causal" and absorbed not in {None, num_rows}:
            allowed = f"{num_rows} rows, or None, when the mask is {mask}"
            raise InvalidArgument("absorbed_rows", absorbed, allowed)
        if mask != "causal":
            return num_rows
        if absorbed is None:
            forms = Forms(self._prices, query_lens, told.max_seq_lens)
            rows = forms.absorbed_rows()
            if not self._told_of_order and (query_lens[1:] < query_lens[:-1]).any():
                self._tell_of_order(forms.slowdown(rows))
            return rows
        if not 0 <= absorbed <= num_rows:
            raise InvalidArgument("absorbed_rows", absorbed, f"0 to {num_rows} rows, or None")
        return absorbed

    def _tell_of_order(self, times: float) -> None:
        """Say once that another order of rows would be faster."""
        if times > _SLOW:
            self._told_of_order = True
            LOGGER.warning(
                "a step takes about %.1f times as long as with its rows of few queries first", times
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
