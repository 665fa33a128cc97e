"""The metadata builder, which describes each step once for all layers of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.engines.vllm.convert import cache_format, capacities
from paged_mla_optimized.engines.vllm.decode import Decode, FixedLengths, Step
from paged_mla_optimized.engines.vllm.options import options_of
from paged_mla_optimized.engines.vllm.reasons import refuse_adapters, refuse_variance
from paged_mla_shared.errors import Unsupported


@dataclass
class PagedMlaDecodeMetadata(MLACommonDecodeMetadata):
    """vLLM's decode metadata, and the step that the layers plan and compute."""

    step: Step | None = None


@dataclass
class PagedMlaMetadata(MLACommonMetadata[PagedMlaDecodeMetadata]):
    """vLLM's metadata, with the decode metadata of this package."""


class PagedMlaMetadataBuilder(MLACommonMetadataBuilder[PagedMlaMetadata]):
    """Describe the decode rows of each step; vLLM's own code describes the prefill rows.

    The tensors of lengths and tables that vLLM passes have the same addresses at the capture of a
    graph and at its replays. The lengths of microbatches do not, so the builder copies them to
    tensors with fixed addresses.

    Raises
    ------
    Unsupported
        Layers of one group differ in their number of heads, softmax scale or cache dtype; an
        option or a LoRA adapter is not supported.
    InvalidArgument
        ``additional_config["paged_mla"]`` has an unknown option or value, or the configuration
        exceeds a limit of ``MlaConfig``.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        options = options_of(vllm_config.additional_config)
        is_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        if is_invariant:
            refuse_variance(options)
        self.reorder_batch_threshold = options.absorbed_query_len  # the base class may raise it
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, PagedMlaMetadata)
        context = vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in layer_names]
        refuse_adapters(layers)
        dtype, longest = self.model_config.dtype, self.reorder_batch_threshold
        rows, tokens = capacities(
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_graph_tokens=vllm_config.compilation_config.max_cudagraph_capture_size or 0,
            longest=longest,
        )
        config = MlaConfig(
            # vLLM gathers the heads of all ranks. ``self.num_heads`` is that of the target model,
            # and a draft model may have another number of heads.
            num_heads=_common("num_heads", [layer.num_heads for layer in layers])
            * self.dcp_world_size,
            softmax_scale=_common("scale", [layer.scale for layer in layers]),
            block_size=kv_cache_spec.block_size,
            max_rows=rows,
            max_query_tokens=tokens,
            max_model_len=self.model_config.max_model_len,
            kv_lora_rank=self.mla_dims.kv_lora_rank,
            qk_rope_head_dim=self.mla_dims.qk_rope_head_dim,
            dtype=dtype,
            cache_format=cache_format(
                _common("kv_cache_dtype", [layer.kv_cache_dtype for layer in layers]), dtype
            ),
            products=options.products,
            batch_invariant=is_invariant,
        )
        speculation = vllm_config.speculative_config
        drafts = 0 if speculation is None else speculation.num_speculative_tokens or 0
        lengths = sorted({1, min(1 + drafts, longest), longest})
        self.decode = Decode(config, device, lengths)
        self._layers, self._slots = layers, None
        self._fixed = None
        if vllm_config.parallel_config.use_ubatching:
            self._fixed = FixedLengths(rows, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedMlaMetadata:
        """Describe a step, in which the decode rows come first."""
        self._slots = common_attn_metadata.slot_mapping
        metadata: PagedMlaMetadata = super().build(
            common_prefix_len, common_attn_metadata, fast_build
        )
        return metadata

    def _build_decode(
        self,
        *,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,  # values on the host
    ) -> PagedMlaDecodeMetadata:
        if self._fixed is not None:
            query_start_loc_device, seq_lens_device = self._fixed.hold(
                query_start_loc_device, seq_lens_device
            )
        step = Step(
            self.decode,
            query_start_loc_device,
            seq_lens_device,
            block_table_tensor,
            num_decode_tokens,
            None if self._slots is None else self._slots[:num_decode_tokens],
        )
        self.decode.check(step, [layer._k_scale for layer in self._layers])
        return PagedMlaDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            step=step,
        )


def _common(name: str, values: list[Any]) -> Any:
    """Return the one value that all layers of a group have.

    Raises
    ------
    Unsupported
        The layers have several values.
    """
    found = set(values)
    if len(found) > 1:
        raise Unsupported(
            f"layers of one KV cache group have different values of {name}: {sorted(found)}; "
            "paged_mla supports one value for all layers of a group"
        )
    return values[0]
