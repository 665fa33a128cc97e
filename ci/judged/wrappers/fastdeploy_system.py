"""FastDeploy's page lists, number of splits and decode, called in the order of its backend."""

from fastdeploy.model_executor.layers.attention.triton_ops.decode_attention import (
    compute_num_kv_splits,
    decode_attention_fwd,
)
from fastdeploy.model_executor.layers.attention.triton_ops.unified_extend_attention import (
    build_kv_indices_from_block_tables,
)


def attend(q, k, v, o, block_table, seq_lens, attn_logits, attn_lse, most, scale, size) -> None:
    """Write the output to `o`."""
    pages = build_kv_indices_from_block_tables(block_table, seq_lens, size, len(q))
    splits = compute_num_kv_splits(seq_lens, len(q), most)
    decode_attention_fwd(q, k, v, o, *pages, attn_logits, attn_lse, splits, most, scale, size)
