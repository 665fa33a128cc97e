"""The backend class, which plans steps and computes the attention of one layer."""

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
    """Dense MLA for SGLang; ``attention_backend="paged_mla"`` selects it.

    Steps of decode rows and of draft chains are planned inside a CUDA graph if SGLang allows it, so
    that a replay plans on the device. Other steps are planned before a capture and before each
    replay.

    Parameters
    ----------
    model_runner : ModelRunner
    ahead : int
        The number of tokens that the length of a decode row does not count. In step i of a draft
        model these are the i tokens that earlier steps have drafted.

    Raises
    ------
    Unsupported
        The model, its cache, the device or a server option is not supported.
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
        if is_tree and is_tbo_enabled():  # SGLang splits the masks as if they were FULL_MASK
            raise Unsupported(
                "draft trees cannot run with two-batch overlap in paged_mla; "
                "use draft chains (EAGLE with speculative_eagle_topk=1) or disable the overlap"
            )
        # SGLang's layers and workers read these three attributes.
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
        self._recorded: set[tuple[Any, int]] = set()  # mode and rows of each graph that plans
        self._windows: dict[int, int] = {}  # rows of a draft-extend graph -> its query length
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
        """The buffer for SGLang's masks of draft trees, ``None`` without drafts.

        The kernels do not read the mask of draft chains.
        """
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Reject draft trees here, because the step was planned before the tree was drafted.

        Draft chains need no mask, so the method does nothing for them.

        Raises
        ------
        Unsupported
            The drafts are trees.
        """
        if self._verify_mask is not None and self._verify_mask.is_read:
            raise Unsupported(
                "draft trees cannot run with SGLANG_ENABLE_OVERLAP_PLAN_STREAM in paged_mla; "
                "use draft chains (EAGLE with speculative_eagle_topk=1) or unset the variable"
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return 1, the length of rows that pad a CUDA graph."""
        return 1

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Check that the largest graph fits the buffers, which exist already.

        Raises
        ------
        InvalidArgument
            The graph has more rows or tokens than the configuration allows.
        """
        config = self.rows.config
        for name, size, most in (
            ("max_bs", max_bs, config.max_rows),
            ("max_num_tokens", max_num_tokens, config.max_query_tokens),
        ):
            if size > most:
                raise InvalidArgument(name, f"{size} in CUDA graphs", f"at most {most}")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a step that runs outside of a CUDA graph."""
        self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan a step before the capture or the replay of its CUDA graph.

        A graph that plans by itself needs no plan before its replay. With ``PAGED_MLA_CHECK=1`` the
        method plans before each replay, so that the step is checked.

        Parameters
        ----------
        forward_batch : ForwardBatch or view of a replay
            A view may lack attributes of a ``ForwardBatch``, and its tensors may be longer than
            ``batch_size``.
        in_capture : bool
            Whether the graph is being captured.

        Raises
        ------
        Unsupported
            A prefill or mixed step would be captured in a full CUDA graph.
        """
        batch, mode = forward_batch, forward_batch.forward_mode
        fixed = mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()
        if in_capture and not (fixed or mode.is_idle()):
            raise Unsupported(
                "prefill cannot be captured in a full CUDA graph with paged_mla; use piecewise "
                "CUDA graphs for prefill, or disable CUDA graphs for prefill"
            )
        if in_capture and mode.is_draft_extend_v2():
            self._windows[batch.batch_size] = _window(batch)
        is_planned = (mode, batch.batch_size) in self._recorded  # by the graph itself
        if in_capture or not is_planned or self.rows.checks:
            with self.rows.unchecked() if in_capture else nullcontext():
                self._plan(batch, self._windows.get(batch.batch_size))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plan a step inside its CUDA graph if the graph's replays read the same tensors.

        These are steps of decode rows and of draft chains. The method does nothing for other steps.
        """
        batch, mode = forward_batch, forward_batch.forward_mode
        is_tree = self._verify_mask is not None and self._verify_mask.is_read
        if not (mode.is_decode() or (mode.is_target_verify() and not is_tree)):
            return
        self._plan(batch)
        if torch.cuda.is_current_stream_capturing():
            self._recorded.add((mode, batch.batch_size))

    def _plan(self, batch: Any, window: int | None = None) -> None:
        """Plan a step.

        `window` is the query length that a draft-extend graph was captured with. A replay's batch
        does not contain it, because its rows are padded and its slots are not.
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
                    "rows that verify different numbers of drafts are not supported by paged_mla; "
                    "set SGLANG_RAGGED_VERIFY_MODE=static"
                )
            drafts = int(batch.spec_info.draft_token_num)
            self.rows.plan(ids, lens + drafts, drafts, self._tree_mask(batch, lens, drafts))
        elif mode.is_draft_extend_v2():
            window = _window(batch) if window is None else window
            # Rows that pad a graph have length 1, which is less than the query length.
            self.rows.plan(ids, lens.clamp(min=window), window)
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
        """Write the step's keys to the pool if `save_kv_cache`, and attend over latents.

        Parameters
        ----------
        q : dtype [T, H * R], or joined with the rotated queries [T, H * (R + P)]
            The absorbed queries; any shape that has these elements.
        k : dtype [T, 1, R], or joined with the rotated keys [T, 1, R + P], or None
            The latents.
        v : tensor or None
            Not read: the latents are the values.
        layer : RadixAttention
        forward_batch : ForwardBatch
            ``out_cache_loc`` has the slots of the new tokens.
        save_kv_cache : bool
        q_rope, k_rope : tensor or None
            The rotated queries and keys if `q` and `k` do not contain them.
        **extras
            Every value must be ``None``.

        Returns
        -------
        dtype [T, H * R]

        Raises
        ------
        Unsupported
            A value of `extras` is not ``None``.
        """
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
        """Compute the attention of prefill, mixed, verification and draft-extend steps.

        A layer whose head size is R + P attends over latents, as in :meth:`forward_decode`. Another
        layer attends over the per-head keys and values `k` and `v`.

        Returns
        -------
        dtype [T, H * R] or [T, H * V], or (dtype [T, H, V], float32 [T, H])
            The outputs; outputs and natural lse over per-head keys if the batch requests the lse.

        Raises
        ------
        Unsupported
            A value of `extras` is not ``None``, or per-head keys and values are missing or are to
            be cached.
        """
        if layer.qk_head_dim == self._head_size:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **extras)
        refuse_extras(extras)
        if k is None or v is None or save_kv_cache:
            raise Unsupported(
                "paged_mla attends over per-head keys and values only if they are passed in and "
                "are not to be cached; pass k and v, and save_kv_cache=False"
            )
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
        """Return the masks between the drafts of each row, ``None`` for draft chains."""
        own = self._verify_mask
        if own is None or not own.is_read:
            return None
        mask: torch.Tensor = batch.spec_info.custom_mask
        if mask.data_ptr() == own.buffer.data_ptr():
            return mask
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            # A replay of this graph would not read the mask of its own step.
            raise Unsupported(
                "a draft tree's mask at another address in each step cannot be captured in a CUDA "
                "graph with paged_mla; write it to the backend's verify_mask buffer"
            )
        return own_masks(mask, lens, drafts)


def _graph_tokens() -> int:
    """Return the number of tokens of the largest prefill graph, 0 without prefill graphs."""
    graphs = get_exec().graph.cuda_graph_config
    if graphs is None or graphs.prefill.backend == "disabled":
        return 0
    return max(graphs.prefill.bs or (), default=0)


def _window(batch: Any) -> int:
    """Return the number of tokens of each row in a draft-extend step.

    The first row is a row of a request: padding comes after the rows of requests.
    """
    return int(batch.extend_seq_lens_cpu[0])


def _refuse(runner: Any) -> None:
    """Raise ``Unsupported`` for a model, a pool or a device that is not supported."""
    if not runner.use_mla_backend:
        if runner.is_draft_worker:
            raise Unsupported(
                "a draft model without MLA is not supported by paged_mla; "
                'set speculative_draft_attention_backend="triton"'
            )
        raise Unsupported(
            "a model without MLA is not supported by paged_mla; use another attention_backend"
        )
    if getattr(runner.token_to_kv_pool, "use_dsa", False):
        raise Unsupported(
            "sparse attention (DSA) is not supported by paged_mla; use a model with dense attention"
        )
    if get_parallel().dcp_enabled:
        raise Unsupported(
            "decode context parallelism is not supported by paged_mla in SGLang; disable it"
        )
    if get_parallel().attn_cp_size > 1:
        raise Unsupported(
            "prefill context parallelism is not supported by paged_mla in SGLang; "
            "use attn_cp_size=1"
        )
    if mambaish_config(runner.model_config) is not None:
        raise Unsupported(
            "hybrid models (Mamba or linear attention) are not supported by paged_mla; "
            "use a model with attention in every layer"
        )
    if moves_tokens(runner):
        raise Unsupported(
            "a unified memory pool is not supported by paged_mla, because its request map does "
            "not contain slots; disable the unified memory pool"
        )
    model = runner.model_config
    reason = misfit(
        head_size=model.kv_lora_rank + model.qk_rope_head_dim,
        dtype=runner.dtype,
        capability=torch.cuda.get_device_capability(),
    )
    if reason is not None:
        raise Unsupported(f"paged_mla: {reason}")
