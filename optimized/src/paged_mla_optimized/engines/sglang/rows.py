"""Rows of SGLang's steps: planned before a forward or a replay, written and attended by layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.engines.sglang.convert import as_blocks, starts_of
from paged_mla_optimized.engines.tensors import as_cache, split_queries
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.tensors.checks import check_capacity
from paged_mla_optimized.tensors.step import MlaStep, RequestMap

_TABLE_MULTIPLE = 8


class Rows:
    """A :class:`~paged_mla_optimized.api.paged_mla.PagedMla` that is fed as SGLang feeds a backend.

    Draft trees have one of their own.

    Parameters
    ----------
    config : MlaConfig
        Causal, of the largest step; how tables are built is added.
    device : torch.device
    req_to_token : int32 [requests, tokens]
        Slots.
    tree_len : int
        New tokens of a row with its draft tree; 0: drafts are chains, or there are none.
    """

    def __init__(
        self,
        config: MlaConfig,
        device: torch.device | str,
        req_to_token: torch.Tensor,
        tree_len: int = 0,
    ) -> None:
        config = replace(config, reserved_slot=0, table_multiple=_TABLE_MULTIPLE)
        self.config = config
        self._causal = self._planned = PagedMla(config, device)
        self._tree = None
        if tree_len > 0:
            trees = replace(
                config,
                mask="tree:qlen",
                max_draft_tokens=tree_len,
                max_query_tokens=config.max_rows * tree_len,
            )
            self._tree = PagedMla(trees, device)
        self._req_to_token = req_to_token
        self._numbers = torch.arange(config.max_rows + 1, dtype=torch.int32, device=device)
        self._unit = torch.ones((), device=device)
        self._switch = CheckSwitch(self._causal.device)

    @property
    def checks(self) -> bool:
        """Whether ``plan`` holds values against the rules now."""
        return self._switch.is_on

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Leave steps within unchecked: those of a capture have lengths and masks of nobody."""
        with self._causal.unchecked(), (self._tree or self._causal).unchecked():
            yield

    def plan(
        self,
        request_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        query_len: int,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Describe a step whose rows have as many new tokens each: decode, and windows of drafts.

        Parameters
        ----------
        request_ids : int [B]
        seq_lens : int [B]
            This step's tokens included.
        query_len : int
        mask : bool, flat, or None
            For each row a matrix [query_len, query_len]: what the nodes of a tree see.

        Raises
        ------
        InvalidArgument
            More rows or tokens than the largest step has.
        """
        rows = len(seq_lens)
        self._planned = self._causal if mask is None else self._of_trees()
        check_capacity(self._planned.config, rows, rows * query_len)  # `_numbers` ends there
        self._planned.plan(
            MlaStep(
                self._numbers[: rows + 1] * query_len,
                seq_lens.int(),
                RequestMap(self._req_to_token, request_ids),
                num_tokens=rows * query_len,
                max_query_len=query_len,
                mask=mask,
            )
        )

    def plan_extend(
        self,
        request_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        num_tokens: int,
    ) -> None:
        """Describe a step whose rows have any numbers of new tokens.

        A row that SGLang makes up for an idle rank is as long as the step of the busiest: what is
        longer than any request is cut off, and its tokens are padding.

        Parameters
        ----------
        request_ids : int [B]
        seq_lens : int [B]
            This step's tokens included.
        extend_seq_lens : int [B]
        num_tokens : int
            Of all rows. With ``batch_invariant`` they do not choose the
            kernel: every such step gets that of the largest (S-20).
        """
        config = self.config
        length = config.max_query_tokens if config.batch_invariant else max(num_tokens, 1)
        self._planned = self._causal
        self._planned.plan(
            MlaStep(
                starts_of(extend_seq_lens.clamp(max=config.max_model_len)),
                seq_lens.clamp(max=config.max_model_len).int(),
                RequestMap(self._req_to_token, request_ids),
                num_tokens=num_tokens,
                max_query_len=length,
            )
        )

    def attend(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        slots: torch.Tensor,
        k_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the step's tokens to one layer's pool, and attend to it.

        SGLang pads steps for ranks of data parallelism, before or after it plans them: tokens past
        the planned ones are left out, and answered with zeros.

        Parameters
        ----------
        q : dtype [T, H, R] and [T, H, P], or both in one [T, H, R + P]
        new : (dtype [T, R], dtype [T, P], int64 [T]) or None
            Latents, rotated keys and where they go; slot 0 is padding's. ``None``: all are there.
        slots : [S, 1, R + P]
            The pool.
        k_scale : float32 [] or None
            Of the layer: what is cached in FP8 is divided by it. ``None`` is 1.

        Returns
        -------
        out : dtype [T, H, R]
        """
        config, mla = self.config, self._planned
        scale = self._unit if k_scale is None else k_scale
        cache = as_cache(config.cache_format, as_blocks(slots, config.block_size), scale)
        tokens = len(mla.positions)
        if new is not None:
            latents, keys, where = (tensor[:tokens] for tensor in new)
            mla.append(latents, keys, cache, where.contiguous())
        q_nope, q_pe = split_queries(q, config.kv_lora_rank)
        if len(q_nope) <= tokens:
            return mla.attend(q_nope, q_pe, cache)[0]
        out = q_nope.new_zeros(q_nope.shape)
        mla.attend(q_nope[:tokens], q_pe[:tokens], cache, out=out[:tokens])
        return out

    def _of_trees(self) -> PagedMla:
        if self._tree is None:
            raise RuntimeError("a mask of a draft tree, where drafts are chains")
        return self._tree
