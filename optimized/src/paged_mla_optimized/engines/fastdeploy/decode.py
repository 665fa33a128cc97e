"""Decode rows of FastDeploy's steps: no FastDeploy and no Paddle here.

Its tensors come as torch's through DLPack. Conversions: a row's context and its new tokens are
counted apart; rows of prompts stand among the others, are answered by another call and added, so
that they get zeros here; rows without new tokens keep the lengths of an earlier step; lengths are
columns, and some have a line for every request that may run; a cache has an axis of one head;
queries and answers of all heads are one line.
"""

from __future__ import annotations

import torch

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.arguments import check_kind
from paged_mla_optimized.tensors.checks import check_tensor
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument


def decode_lens(
    seq_lens_encoder: torch.Tensor,
    seq_lens_decoder: torch.Tensor,
    seq_lens_this_time: torch.Tensor,
) -> torch.Tensor:
    """Return ``seq_lens`` as rules S-2 and S-6 have them, int32 [B], on the device.

    Parameters
    ----------
    seq_lens_encoder : int32 [N] or [N, 1]
        New tokens of prompts. N is at least B: what is past the requests that run is not read.
    seq_lens_decoder : int32 [N] or [N, 1]
        Cached tokens, those of this step not among them.
    seq_lens_this_time : int32 [B] or [B, 1]
        New tokens of any kind.

    Raises
    ------
    InvalidArgument
        One of them has another shape, dtype or device, or fewer lines.
    """
    new = _column("seq_lens_this_time", seq_lens_this_time)
    prompt = _column("seq_lens_encoder", seq_lens_encoder, new)
    cached = _column("seq_lens_decoder", seq_lens_decoder, new)
    is_decode = (new > 0) & (prompt == 0)
    return torch.where(is_decode, cached + new, 0)


class LatentAttention:
    """What ``decode_mla_write_cache`` and ``multi_head_latent_attention`` do.

    Parameters
    ----------
    mla : PagedMla
        Its config without a rope: FastDeploy rotates before it calls.
    query_len : int
        New tokens of a row with all its drafts; rows of prompts do not count.

    Raises
    ------
    InvalidArgument
        `mla` is none, or has a rope.
    """

    def __init__(self, mla: PagedMla, query_len: int = 1) -> None:
        check_kind("mla", mla, PagedMla)
        if mla.config.rope is not None:
            allowed = "one without a rope: FastDeploy rotates before it calls"
            raise InvalidArgument("mla", f"one with {mla.config.rope}", allowed)
        self.mla, self.query_len = mla, query_len

    def plan(
        self,
        seq_lens_encoder: torch.Tensor,
        seq_lens_decoder: torch.Tensor,
        seq_lens_this_time: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        num_tokens: int,
    ) -> None:
        """Describe a step, once for all layers: ``init_attention_metadata``.

        Parameters
        ----------
        seq_lens_encoder, seq_lens_decoder, seq_lens_this_time
            As for :func:`decode_lens`.
        cu_seqlens_q : int32 [B + 1], or longer
            Prefix sums of ``seq_lens_this_time``.
        block_tables : int32 [N, M]
            Entries past a row's last block hold -1, or anything.
        num_tokens : int
            Lines of the queries, padding included.
        """
        seq_lens = decode_lens(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time)
        rows = len(seq_lens)
        check_kind("block_tables", block_tables, torch.Tensor)
        self.mla.plan(
            MlaStep(
                cu_seqlens_q[: rows + 1],
                seq_lens,
                block_tables[:rows],
                num_tokens=num_tokens,
                max_query_len=self.query_len,
            )
        )

    def write(
        self, compressed_kv: torch.Tensor, k_pe: torch.Tensor, latent_cache: torch.Tensor
    ) -> None:
        """Write the decode rows' new tokens; those of prompts are not touched.

        Parameters
        ----------
        compressed_kv : dtype [T, R]
        k_pe : dtype [T, P], or [T, 1, P]
        latent_cache : dtype [num_blocks, 1, block_size, R + P]
        """
        k_pe, cache = _headless("k_pe", k_pe, 2), _headless("latent_cache", latent_cache, 3)
        self.mla.append(compressed_kv, k_pe, cache)

    def attend(self, q: torch.Tensor, latent_cache: torch.Tensor) -> torch.Tensor:
        """Return the answers of decode rows, dtype [T, H * R], and zeros for all other tokens.

        Parameters
        ----------
        q : dtype [T, H * (R + P)]
            Absorbed and rotated, joined for each head.
        latent_cache : dtype [num_blocks, 1, block_size, R + P]
        """
        config = self.mla.config
        widths = [config.kv_lora_rank, config.qk_rope_head_dim]
        shape = (None, config.num_heads * sum(widths))
        check_tensor("q", q, shape, config.dtype, self.mla.device, unit_stride=True)
        heads = q.view(q.shape[0], config.num_heads, sum(widths))
        q_nope, q_pe = torch.split(heads, widths, dim=-1)
        out, _ = self.mla.attend(q_nope, q_pe, _headless("latent_cache", latent_cache, 3))
        return out.flatten(1)


def _column(name: str, lens: torch.Tensor, new: torch.Tensor | None = None) -> torch.Tensor:
    """Return the lengths of the requests that have `new` tokens, or all."""
    check_kind(name, lens, torch.Tensor)
    kept = lens.numel()
    rows = kept if new is None else len(new)
    if lens.shape not in {(kept,), (kept, 1)} or kept < rows:
        allowed = "[B] or [B, 1]" if new is None else f"[N] or [N, 1], N at least {rows}"
        raise InvalidArgument(name, f"shape {list(lens.shape)}", allowed)
    check_tensor(name, lens, lens.shape, torch.int32, None if new is None else new.device)
    return lens.flatten()[:rows]


def _headless(name: str, tensor: torch.Tensor, axes: int) -> torch.Tensor:
    """Return a tensor of so many axes, without that of its one head if it has it."""
    check_kind(name, tensor, torch.Tensor)
    return tensor.squeeze(1) if tensor.ndim == axes + 1 else tensor
