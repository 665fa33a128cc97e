"""The backend class: describes steps, and runs one layer's attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.moe.utils import is_tbo_enabled
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_exec, get_memory, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.engines.fits import misfit
from paged_mla_optimized.engines.sglang.convert import cache_format, capacities, own_masks
from paged_mla_optimized.engines.sglang.prompts import Prompts
from paged_mla_optimized.engines.sglang.reasons import (
    common_scaling,
    refuse_extras,
    refuse_mixed_scales,
    refuse_variance,
)
from paged_mla_optimized.engines.sglang.rows import Rows
from paged_mla_optimized.engines.sglang.versions import attention_backends, moves_tokens, tokens_of
from paged_mla_shared.errors import InvalidArgument, Unsupported


class PagedMlaBackend(AttentionBackend):
    """Dense MLA for SGLang; ``attention_backend="paged_mla"`` chooses it.

    Decode rows and chains of drafts are planned inside a CUDA graph where SGLang lets them be, so
    that its replays plan by themselves; all others before a capture and before each replay.

    Parameters
    ----------
    model_runner : ModelRunner
    ahead : int
        Tokens of a decode row that its length leaves out: a step of a draft has drafted so many.

    Raises
    ------
    Unsupported
        The model, its cache or the device is not served.
    """

    needs_cpu_seq_lens: bool = False
    extend_dummy_seqs_capped_by_req_pool: bool = True

    def __init__(self, model_runner: Any, ahead: int = 0) -> None:
        super().__init__()
        _refuse(model_runner)
        is_deterministic = bool(get_exec().deterministic.enable_deterministic_inference)
        if is_deterministic:
            refuse_variance(
                has_radix_cache=not get_memory().disable_radix_cache,
                chunked_prefill_size=get_schedule().chunked_prefill_size,
            )
        model = model_runner.model_config
        self._head_size = model.kv_lora_rank + model.qk_rope_head_dim
        layers = [
            layer
            for layer in model_runner.model.modules()
            if isinstance(layer, RadixAttention) and layer.qk_head_dim == self._head_size
        ]
        scale = common_scaling(layers)
        spec = get_spec()
        drafts = int(spec.speculative_num_draft_tokens or 1)
        is_tree = not model_runner.is_draft_worker and (
            model_runner.spec_algorithm.is_ngram() or (spec.speculative_eagle_topk or 1) > 1
        )
        if is_tree and is_tbo_enabled():  # halves of a batch get masks cut where FULL_MASK has rows
            raise Unsupported("paged_mla: trees of drafts in two overlapping batches: chains")
        # SGLang's layers and workers read these three of the backend.
        self.req_to_token_pool = requests = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = model.context_len
        schedule, parallel = get_schedule(), get_parallel()
        rows, tokens = capacities(
            max_requests=requests.size,
            rank_multiple=parallel.attn_tp_size,
            chunked_prefill_size=schedule.chunked_prefill_size,
            chunks_grow=schedule.enable_dynamic_chunking and parallel.pp_size > 1,
            graph_tokens=_graph_tokens(),
            max_prefill_tokens=schedule.max_prefill_tokens,
            context_len=model.context_len,
            query_len=drafts,
        )
        config = MlaConfig(
            num_heads=layers[0].tp_q_head_num,
            softmax_scale=scale,
            block_size=model_runner.page_size,
            max_rows=rows,
            max_query_tokens=tokens,
            max_model_len=requests.req_to_token.shape[1],
            kv_lora_rank=model.kv_lora_rank,
            qk_rope_head_dim=model.qk_rope_head_dim,
            dtype=model_runner.dtype,
            cache_format=cache_format(model_runner.kv_cache_dtype, model_runner.dtype),
            batch_invariant=is_deterministic,
        )
        if config.is_fp8:
            refuse_mixed_scales(
                {layer.k_scale_float for layer in layers}, attention_backends(model_runner)
            )
        device = torch.device(model_runner.device)
        self.rows = Rows(config, device, requests.req_to_token, drafts if is_tree else 0)
        self.prompts = Prompts(
            PrefillConfig(
                num_heads=config.num_heads,
                softmax_scale=scale,
                max_rows=rows,
                max_tokens=tokens,
                qk_nope_head_dim=model.qk_nope_head_dim,
                qk_rope_head_dim=model.qk_rope_head_dim,
                v_head_dim=model.v_head_dim,
                dtype=config.dtype,
            )
        )
        self._ahead = ahead
        self._recorded: set[tuple[Any, int]] = set()  # modes and rows of graphs that plan
        self._windows: dict[int, int] = {}  # of graphs of a draft's extension, by rows
        self._verify_mask = None
        if drafts > 1 and not model_runner.is_draft_worker:
            self._verify_mask = VerifyMask(
                buffer=torch.ones(rows * drafts * drafts, dtype=torch.bool, device=device),
                mode=TreeMaskMode.QLEN_ONLY,
                max_bs=rows,
                is_read=is_tree,
            )

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Where SGLang writes what drafts see of each other; it is not read for chains."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Refuse trees whose step was planned before they were drafted; chains read no mask."""
        if self._verify_mask is not None and self._verify_mask.is_read:
            raise Unsupported("trees beside SGLANG_ENABLE_OVERLAP_PLAN_STREAM: chains")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of rows that pad a CUDA graph."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Hold the largest graph against the buffers, which there are."""
        config = self.rows.config
        for name, size, most in (
            ("max_bs", max_bs, config.max_rows),
            ("max_num_tokens", max_num_tokens, config.max_query_tokens),
        ):
            if size > most:
                raise InvalidArgument(name, f"{size} in CUDA graphs", f"at most {most}")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step that is in no graph."""
        self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a step before its graph, unless that does; ``PAGED_MLA_CHECK=1`` has it always.

        ``forward_batch`` may be less than a ``ForwardBatch``, and longer.
        """
        batch, mode = forward_batch, forward_batch.forward_mode
        fixed = mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()
        if in_capture and not (fixed or mode.is_idle()):
            raise Unsupported("prompts in a full CUDA graph: other graphs of prompts, or none")
        if in_capture and mode.is_draft_extend_v2():
            self._windows[batch.batch_size] = _window(batch)
        is_planned = (mode, batch.batch_size) in self._recorded  # by the graph itself
        if in_capture or not is_planned or self.rows.checks:
            with self.rows.unchecked() if in_capture else nullcontext():
                self._plan(batch, self._windows.get(batch.batch_size))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan a step whose lengths and requests keep their places from capture to replay."""
        batch, mode = forward_batch, forward_batch.forward_mode
        is_tree = self._verify_mask is not None and self._verify_mask.is_read
        if not (mode.is_decode() or (mode.is_target_verify() and not is_tree)):
            return
        self._plan(batch)
        if torch.cuda.is_current_stream_capturing():
            self._recorded.add((mode, batch.batch_size))

    def _plan(self, batch: Any, window: int | None = None) -> None:
        """Plan a step; `window` of a draft's extension is a graph's, whose replays show it no more.

        A replay has its rows padded, and its slots not.
        """
        mode = batch.forward_mode
        if mode.is_idle():
            return
        rows = batch.batch_size
        ids, lens = batch.req_pool_indices[:rows], batch.seq_lens[:rows]
        if mode.is_decode():
            self.rows.plan(ids, lens + self._ahead, 1)
        elif mode.is_target_verify():
            if getattr(batch.spec_info, "ragged_verify_layout", None) is not None:
                raise Unsupported(
                    "paged_mla: rows that verify different numbers of drafts: "
                    "SGLANG_RAGGED_VERIFY_MODE=static"
                )
            drafts = int(batch.spec_info.draft_token_num)
            self.rows.plan(ids, lens + drafts, drafts, self._tree_mask(batch, lens, drafts))
        elif mode.is_draft_extend_v2():
            window = _window(batch) if window is None else window
            self.rows.plan(ids, lens.clamp(min=window), window)  # rows that pad a graph are short
        else:
            self.prompts.begin(batch.extend_seq_lens, lens)
            self.rows.plan_extend(ids, lens, batch.extend_seq_lens, tokens_of(batch))

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **extras: Any,
    ) -> torch.Tensor:
        """Attend one new token of each row."""
        refuse_extras(extras)
        heads, latent = layer.tp_q_head_num, layer.v_head_dim
        q = q.view(-1, heads, latent if q_rope is not None else self._head_size)
        new = None
        if save_kv_cache and k is not None:
            latents = k.view(-1, k.shape[-1])
            keys = latents[:, latent:] if k_rope is None else k_rope.flatten(1)
            new = latents[:, :latent], keys, forward_batch.out_cache_loc
        out = self.rows.attend(
            q if q_rope is None else (q, q_rope.view(len(q), heads, -1)),
            new,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            layer.k_scale,
        )
        return out.flatten(1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extras: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend prompts, mixed rows and windows of drafts, over latents or over heads."""
        if layer.qk_head_dim == self._head_size:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **extras)
        refuse_extras(extras)
        if k is None or v is None or save_kv_cache:
            raise Unsupported("keys of heads that are not there, or are to be cached")
        heads = layer.tp_q_head_num
        batch, chunk = forward_batch, None
        if batch.attn_attend_prefix_cache:
            chunk = (batch.prefix_chunk_idx, batch.prefix_chunk_cu_seq_lens)
        out, lse = self.prompts.attend(
            *(tensor.view(len(tensor), heads, -1) for tensor in (q, k, v)),
            chunk=chunk,
            with_prefix=bool(batch.mha_one_shot),
        )
        return (out, lse) if batch.mha_return_lse else out.flatten(1)

    def _tree_mask(self, batch: Any, lens: torch.Tensor, drafts: int) -> torch.Tensor | None:
        """Return what drafts see of each other, ``None`` for chains."""
        own = self._verify_mask
        if own is None or not own.is_read:
            return None
        mask: torch.Tensor = batch.spec_info.custom_mask
        if mask.data_ptr() == own.buffer.data_ptr():
            return mask
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            # A graph of planning alone, whose replays show no mask.
            raise Unsupported("paged_mla: a mask that lies elsewhere in each step, in a graph")
        return own_masks(mask, lens, drafts)


def _graph_tokens() -> int:
    """Return the tokens of the largest graph of prompts, 0 if there is none."""
    graphs = get_exec().graph.cuda_graph_config
    if graphs is None or graphs.prefill.backend == "disabled":
        return 0
    return max(graphs.prefill.bs or (), default=0)


def _window(batch: Any) -> int:
    """Return how many tokens of each row a draft model extends; slots and rows may be padded."""
    return int(batch.extend_seq_lens_cpu[0])


def _refuse(runner: Any) -> None:
    """Raise ``Unsupported`` for a model, a pool or a device that is not served."""
    if not runner.use_mla_backend:
        if runner.is_draft_worker:
            raise Unsupported(
                'paged_mla: a draft model without MLA: speculative_draft_attention_backend="triton"'
            )
        raise Unsupported("paged_mla: a model without MLA")
    if getattr(runner.token_to_kv_pool, "use_dsa", False):
        raise Unsupported("paged_mla: sparse attention: dense")
    if get_parallel().dcp_enabled:
        raise Unsupported("paged_mla: decode context parallelism: none")
    if get_parallel().attn_cp_size > 1:
        raise Unsupported("paged_mla: prefill context parallelism: none")
    if mambaish_config(runner.model_config) is not None:
        raise Unsupported("paged_mla: a hybrid model: attention in every layer")
    if moves_tokens(runner):
        raise Unsupported("paged_mla: a unified memory pool: a plain one")
    model = runner.model_config
    reason = misfit(
        head_size=model.kv_lora_rank + model.qk_rope_head_dim,
        dtype=runner.dtype,
        capability=torch.cuda.get_device_capability(),
    )
    if reason is not None:
        raise Unsupported(f"paged_mla: {reason}")
