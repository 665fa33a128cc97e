"""The decode rows of FastDeploy's steps. This file imports neither FastDeploy nor Paddle.

The caller passes FastDeploy's tensors as torch tensors through DLPack. This file converts these
conventions of FastDeploy:

* It counts the cached tokens and the new tokens of a row separately.
* Prefill rows are between the decode rows. Another call computes them, and FastDeploy adds both
  outputs, so this file returns zeros for them.
* Rows without new tokens keep the lengths of an earlier step.
* Tensors of lengths are columns, and some have a line for every request that may run.
* A cache has an axis for its one head.
* The queries and the outputs of all heads are joined in one line for each token.
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
    """Return the ``seq_lens`` of rules S-2 and S-6, int32 [B], on the device.

    They are 0 for prefill rows and for rows without new tokens.

    Parameters
    ----------
    seq_lens_encoder : int32 [N] or [N, 1]
        The number of new tokens of prefill rows, 0 for decode rows. N is at least B; the function
        does not read entries after the first B.
    seq_lens_decoder : int32 [N] or [N, 1]
        The number of cached tokens, without the tokens of this step.
    seq_lens_this_time : int32 [B] or [B, 1]
        The number of new tokens, of prefill rows and of decode rows.

    Raises
    ------
    InvalidArgument
        A tensor has another shape, dtype or device, or fewer than B entries.
    """
    new = _column("seq_lens_this_time", seq_lens_this_time)
    prompt = _column("seq_lens_encoder", seq_lens_encoder, new)
    cached = _column("seq_lens_decoder", seq_lens_decoder, new)
    is_decode = (new > 0) & (prompt == 0)
    return torch.where(is_decode, cached + new, 0)


class LatentAttention:
    """A replacement for ``decode_mla_write_cache`` and ``multi_head_latent_attention``.

    Parameters
    ----------
    mla : PagedMla
        Its config must have no rope, because FastDeploy rotates queries and keys itself.
    query_len : int
        The number of new tokens of a decode row with all its drafts.

    Raises
    ------
    InvalidArgument
        `mla` is not a :class:`PagedMla`, or its config has a rope.
    """

    def __init__(self, mla: PagedMla, query_len: int = 1) -> None:
        check_kind("mla", mla, PagedMla)
        if mla.config.rope is not None:
            allowed = "a PagedMla without a rope, because FastDeploy rotates queries and keys"
            raise InvalidArgument("mla", f"a PagedMla with {mla.config.rope}", allowed)
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
        """Plan a step once for all layers, in place of ``init_attention_metadata``.

        Parameters
        ----------
        seq_lens_encoder, seq_lens_decoder, seq_lens_this_time
            The arguments of :func:`decode_lens`.
        cu_seqlens_q : int32 [B + 1], or longer
            Prefix sums of ``seq_lens_this_time``.
        block_tables : int32 [N, M]
            Entries after the last block of a row may have any value, for example -1.
        num_tokens : int
            The number of query tokens T, padding included.

        Raises
        ------
        InvalidArgument
            An argument has another shape, dtype or device, or the step exceeds the configuration.
        """
        seq_lens = decode_lens(seq_lens_encoder, seq_lens_decoder, seq_lens_this_time)
        rows = len(seq_lens)
        given = {"cu_seqlens_q": (cu_seqlens_q, 1), "block_tables": (block_tables, 2)}
        for name, (tensor, axes) in given.items():
            check_kind(name, tensor, torch.Tensor)
            if tensor.ndim != axes:
                raise InvalidArgument(name, list(tensor.shape), f"a tensor with {axes} axes")
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
        """Write the keys of the decode rows' new tokens, and no keys of prefill rows.

        Parameters
        ----------
        compressed_kv : dtype [T, R]
            The latents of all tokens of the step.
        k_pe : dtype [T, P] or [T, 1, P]
            Their rotated keys.
        latent_cache : dtype [num_blocks, 1, block_size, R + P]
        """
        k_pe, cache = _headless("k_pe", k_pe, 2), _headless("latent_cache", latent_cache, 3)
        self.mla.append(compressed_kv, k_pe, cache)

    def attend(self, q: torch.Tensor, latent_cache: torch.Tensor) -> torch.Tensor:
        """Return the outputs of decode rows, dtype [T, H * R], and zeros for all other tokens.

        Parameters
        ----------
        q : dtype [T, H * (R + P)]
            For each head the absorbed query and the rotated query.
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
    """Check a tensor of lengths and return it as int32 [B]; B is the length of `new` if given."""
    check_kind(name, lens, torch.Tensor)
    kept = lens.numel()
    rows = kept if new is None else len(new)
    if lens.shape not in {(kept,), (kept, 1)} or kept < rows:
        allowed = "[B] or [B, 1]" if new is None else f"[N] or [N, 1], N at least {rows}"
        raise InvalidArgument(name, f"shape {list(lens.shape)}", allowed)
    check_tensor(name, lens, lens.shape, torch.int32, None if new is None else new.device)
    return lens.flatten()[:rows]


def _headless(name: str, tensor: torch.Tensor, axes: int) -> torch.Tensor:
    """Return a tensor without axis 1, which is of its one head, if it has ``axes + 1`` axes."""
    check_kind(name, tensor, torch.Tensor)
    return tensor.squeeze(1) if tensor.ndim == axes + 1 else tensor
