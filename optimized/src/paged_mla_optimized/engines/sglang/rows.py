"""The rows of SGLang's steps over latents: plans, and the calls of the layers."""

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
    """A :class:`~paged_mla_optimized.api.paged_mla.PagedMla` with the inputs of an SGLang backend.

    Draft trees use a second instance.

    Parameters
    ----------
    config : MlaConfig
        A causal configuration for the largest step. This class sets ``reserved_slot`` and
        ``table_multiple``.
    device : torch.device
    req_to_token : int32 [requests, tokens]
        SGLang's request map, which contains the slot of each token.
    tree_len : int
        The number of new tokens of a row with a draft tree; 0 without draft trees.
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
        """Whether ``plan`` checks the values of a step now."""
        return self._switch.is_on

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Disable checks inside the context: a capture has lengths and masks of no request."""
        with self._causal.unchecked(), (self._tree or self._causal).unchecked():
            yield

    def plan(
        self,
        request_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        query_len: int,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Plan a step whose rows have the same number of new tokens: decode rows or drafts.

        Parameters
        ----------
        request_ids : int [B]
            The line of each row in the request map.
        seq_lens : int [B]
            The number of keys of each row, this step's tokens included.
        query_len : int
            The number of new tokens of each row.
        mask : bool, flat, or None
            For each row a matrix [query_len, query_len] with the keys that each node of its draft
            tree attends to.

        Raises
        ------
        InvalidArgument
            The step has more rows or tokens than the configuration allows.
        RuntimeError
            There is a mask, and `tree_len` is 0.
        """
        rows = len(seq_lens)
        self._planned = self._causal if mask is None else self._of_trees()
        check_capacity(self._planned.config, rows, rows * query_len)  # the length of `_numbers`
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
        """Plan a step whose rows have any numbers of new tokens.

        SGLang gives an idle rank a dummy row with as many tokens as the step of the busiest rank.
        The method truncates lengths to ``max_model_len``; the remaining tokens are padding.

        Parameters
        ----------
        request_ids : int [B]
            The line of each row in the request map.
        seq_lens : int [B]
            The number of keys of each row, this step's tokens included.
        extend_seq_lens : int [B]
            The number of new tokens of each row.
        num_tokens : int
            The number of tokens of the step. With ``batch_invariant`` it does not select the kernel
            variant: all steps planned here use the variant of the largest step (S-20).
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
        """Write the step's keys to one layer's pool, and compute its attention.

        SGLang pads steps for ranks of data parallelism, before or after it plans them. The method
        skips tokens after the planned ones and returns zeros for them.

        Parameters
        ----------
        q : dtype [T, H, R] and [T, H, P], or joined [T, H, R + P]
        new : (dtype [T, R], dtype [T, P], int64 [T]) or None
            Latents, rotated keys and their slots; slot 0 is reserved for padding. With ``None``
            nothing is written.
        slots : [S, 1, R + P]
            The pool of the layer, in its cache dtype.
        k_scale : float32 [] or None
            The scale of the layer. Keys are divided by it when they are written to an FP8 cache.
            ``None`` means 1.

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
            raise RuntimeError(
                "plan() got a mask of a draft tree, but drafts are chains; create Rows with a "
                "tree_len above 0"
            )
        return self._tree
