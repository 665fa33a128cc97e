"""The rows of a batch: their blocks, lengths and padding, and their current step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.engines.transformers.attention import OF_THIS_MODEL
from paged_mla_optimized.engines.transformers.pool import LatentPool
from paged_mla_optimized.tensors.checks import check_tensor
from paged_mla_optimized.tensors.head_weights import HeadWeights
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument, Unsupported


@dataclass
class Step:
    """One forward of a model.

    Parameters
    ----------
    shape : (int, int)
        The number of rows B and of tokens per row T, padding included.
    tokens : int64 [n] or None
        The indices, among the B * T tokens, of tokens that are not padding; ``None`` means all.
    mask : bool [B, columns] or None
        The mask that the first layer received.
    next_layer : int
        The layer that attends next.
    """

    shape: tuple[int, int]
    tokens: torch.Tensor | None
    mask: torch.Tensor | None
    next_layer: int = 0


class Rows:
    """The rows of one cache in a pool.

    The library counts the columns of a rectangle, in which a mask marks padding. A row of this
    class has only its own tokens: padding at any position is neither stored nor read.

    Parameters
    ----------
    pool : LatentPool
    """

    def __init__(self, pool: LatentPool) -> None:
        self.pool = pool
        self.blocks: list[list[int]] = []
        self.is_token: NDArray[np.bool_] = np.zeros((0, 0), dtype=np.bool_)  # [B, columns]
        self.step: Step | None = None
        self._lacks_tokens = False  # whether a forward of these rows raised an error at its start

    def __del__(self) -> None:
        for blocks in self.blocks:  # without itertools: modules may be gone when Python exits
            self.pool.release(blocks)

    def __reduce__(self) -> NoReturn:
        """Reject pickling and shallow copies, which would not count the owners of blocks.

        Raises
        ------
        Unsupported
            Always.
        """
        raise Unsupported(
            "pickling or copying a PagedMlaCache is not supported, because its tokens are in its "
            "pool; keep the token ids and run them again, or use copy.deepcopy within a process, "
            "which shares the blocks"
        )

    @property
    def columns(self) -> int:
        """The number of cached columns, padding included, which the library calls the length."""
        return int(self.is_token.shape[1])

    def fork(self) -> Rows:
        """Return a copy of these rows that shares their blocks."""
        self.pool.turns.check_idle(self)
        twin = Rows(self.pool)
        twin.blocks = [list(blocks) for blocks in self.blocks]
        twin.is_token, twin.step = self.is_token, self.step
        twin._lacks_tokens = self._lacks_tokens
        self.pool.share(itertools.chain(*self.blocks))
        return twin

    def clear(self) -> None:
        """Remove all rows and free their blocks."""
        self.pool.turns.check_idle(self)
        self._drop()

    def _drop(self) -> None:
        self.pool.release(itertools.chain(*self.blocks))
        self.blocks, self.is_token, self.step = [], np.zeros((0, 0), dtype=np.bool_), None
        self._lacks_tokens = False

    def select(self, rows: Sequence[int]) -> None:
        """Replace all rows: the new row i is the old row ``rows[i]``."""
        self.pool.turns.check_idle(self)
        chosen = [list(self.blocks[row]) for row in rows]
        self.pool.share(itertools.chain(*chosen))
        self.pool.release(itertools.chain(*self.blocks))
        self.blocks, self.is_token = chosen, self.is_token[list(rows)]

    def crop(self, columns: int) -> None:
        """Remove the last `columns` columns of every row, and free blocks that become empty."""
        self.pool.turns.check_idle(self)
        self.is_token = self.is_token[:, : max(self.columns - columns, 0)]
        self._lacks_tokens = False
        for blocks, length in zip(self.blocks, self._lengths(), strict=True):
            needed = -(-length // self.pool.config.block_size)
            self.pool.release(blocks[needed:])
            del blocks[needed:]

    def _take_turn(self) -> None:
        """Reserve the pool for the forward of these rows.

        If the pool is in use, the cache lacks the tokens of this forward. A caller that ignores the
        error and continues would get outputs without these tokens, so later forwards raise too.

        Raises
        ------
        InvalidArgument
            Another forward uses the pool, or used it at an earlier forward of these rows.
        """
        if self._lacks_tokens:
            given = "a cache without the tokens of an earlier forward, which raised an error"
            allowed = "a complete cache; call reset(), or call crop(0) and repeat that forward"
            raise InvalidArgument("cache", given, allowed)
        try:
            self.pool.turns.take(self)
        except InvalidArgument:
            self._lacks_tokens = not self.pool.turns.is_of(self)
            raise

    def check_module(self, module: Any, layer: int) -> None:
        """Check that `module` is the pool's module of `layer` and that the kernels support it.

        Raises
        ------
        InvalidArgument
            The module belongs to another model, or :meth:`LatentPool.check_modules` raises it.
        Unsupported
            The module is not supported, for a reason that :class:`LatentPool` lists.
        """
        if not self.pool.serves(module, layer):
            given = f"layer {layer} of another model"
            raise InvalidArgument("cache", given, OF_THIS_MODEL)
        self.pool.check_modules(layer)

    def attend(
        self,
        module: Any,
        layer: int,
        query: torch.Tensor,
        latents: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Append a layer's latents and compute its attention; the first layer plans for all.

        Parameters
        ----------
        module : Module
            A DeepSeek attention.
        layer : int
        query : dtype [B, H, T, N + P]
        latents : dtype [B, 1, T, R] and [B, 1, T, P]
        mask : bool [B, columns] or None
            True for the columns that are tokens and False for padding, over the cached columns and
            the new ones; ``None`` if all are tokens.

        Returns
        -------
        out : dtype [B, T, H, V]
            The outputs of padding are 0.

        Raises
        ------
        InvalidArgument
            The pool is in use, the layers of a forward are not called in order or get different
            tokens, or the step does not fit the cache or the pool.
        Unsupported
            ``torch.autocast`` has changed the dtype of an input.
        """
        pool = self.pool
        self._take_turn()
        if layer == 0:
            self._check_inputs(query, *latents)
            self._begin(query.shape[0], query.shape[2], mask)
        step = self.step
        if step is None or pool.step is not step or step.next_layer != layer:
            given = f"a call of layer {layer} out of order"
            raise InvalidArgument("cache", given, "all layers of one forward in order")
        self._check_same_step(step, query, mask)
        flat = [_lines(tensor, step.tokens) for tensor in (query, *latents)]
        queries, (ckv, k_pe) = flat[0], [tensor.squeeze(1) for tensor in flat[1:]]
        config, cache = pool.mla.config, pool.latents[layer]
        weights = HeadWeights.of_kv_b_proj(
            module.kv_b_proj.weight.detach(), config.attention.num_heads, config.qk_nope_head_dim
        )
        pool.mla.append(ckv, k_pe, cache)
        widths = [config.qk_nope_head_dim, config.attention.qk_rope_head_dim]
        q_nope, q_pe = torch.split(queries, widths, dim=-1)
        out, _ = pool.mla.attend(q_nope, q_pe, cache, weights)
        step.next_layer += 1  # after the calls: a layer that raised has no complete cache
        if step.next_layer == pool.latents.shape[0]:
            pool.turns.end()
        if step.tokens is not None:
            whole = out.new_zeros((step.shape[0] * step.shape[1], *out.shape[1:]))
            out = whole.index_copy_(0, step.tokens, out)
        return out.view(*step.shape, *out.shape[1:])

    def _begin(self, num_rows: int, num_tokens: int, mask: torch.Tensor | None) -> None:
        """Check a step, allocate blocks for its tokens and plan it.

        The rows and the pool are unchanged if a check raises an error.
        """
        pool, config = self.pool, self.pool.config
        self._check_finished()
        if num_rows > config.max_rows:
            raise InvalidArgument("max_rows", f"{num_rows} rows", f"at most {config.max_rows}")
        if self.columns > 0 and num_rows != len(self.blocks):
            given = f"a batch of {num_rows}"
            allowed = f"{len(self.blocks)} rows, as cached; batch_repeat_interleave() adds rows"
            raise InvalidArgument("cache", given, allowed)
        is_token = self._merged(num_rows, num_tokens, mask)
        new = is_token[:, self.columns :]
        query_lens, lengths = new.sum(1).tolist(), is_token.sum(1).tolist()
        if sum(query_lens) > config.max_query_tokens:
            allowed = (
                f"at most {config.max_query_tokens}; generate(prefill_chunk_size=...) splits "
                "longer prompts"
            )
            raise InvalidArgument("max_step_tokens", f"{sum(query_lens)} tokens", allowed)
        if max(lengths) > config.max_model_len:
            allowed = f"at most {config.max_model_len}"
            raise InvalidArgument("max_length", f"a row of {max(lengths)} tokens", allowed)
        self._make_room(query_lens, lengths)
        self.is_token = is_token
        # If an error follows, this step stays unfinished and the next forward raises.
        step = self.step = Step((num_rows, num_tokens), None, mask)
        table = np.zeros((num_rows, max(map(len, self.blocks))), dtype=np.int32)
        for line, blocks in zip(table, self.blocks, strict=True):
            line[: len(blocks)] = blocks
        starts = [0, *itertools.accumulate(query_lens)]
        device = pool.latents.device
        pool.mla.plan(
            MlaStep(
                torch.tensor(starts, dtype=torch.int32, device=device),
                torch.tensor(lengths, dtype=torch.int32, device=device),
                torch.tensor(table, device=device),
                num_tokens=starts[-1],
                query_lens=query_lens,
                max_seq_lens=lengths,
            )
        )
        if not new.all():
            step.tokens = torch.tensor(np.flatnonzero(new), device=device)
        pool.step = step

    def _check_inputs(self, *inputs: torch.Tensor) -> None:
        """Check the dtype, device and number of axes of queries, latents and rotated keys."""
        dtype, device = self.pool.config.dtype, self.pool.latents.device
        others = [tensor.dtype for tensor in inputs if tensor.dtype != dtype]
        if others and torch.is_autocast_enabled(device.type):
            given = f"torch.autocast, which converts {dtype} to {others[0]}"
            raise Unsupported(
                f"{given}, is not supported by paged_mla; convert the model with model.to(dtype) "
                "and call it without autocast"
            )
        for name, tensor in zip(("query", "ckv", "k_pe"), inputs, strict=True):
            check_tensor(name, tensor, (None,) * 4, dtype, device)

    def _check_same_step(self, step: Step, query: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Check that a layer has the same tokens and padding as the first layer, which planned."""
        shape = query.shape[0], query.shape[2]
        if shape != step.shape:
            given = f"{shape[0]} rows of {shape[1]} tokens in layer {step.next_layer}"
            allowed = f"{step.shape[0]} rows of {step.shape[1]} tokens, as in layer 0"
            raise InvalidArgument("query", given, allowed)
        if mask is step.mask:
            return
        here = np.ones_like(self.is_token) if mask is None else mask.cpu().numpy()
        if not np.array_equal(here, self.is_token):
            given = f"another padding in layer {step.next_layer} than in layer 0"
            raise InvalidArgument(
                "attention_mask", given, "the same padding in all layers of a forward"
            )

    def _check_finished(self) -> None:
        layers = self.pool.latents.shape[0]
        if self.step is not None and self.step.next_layer != layers:
            given = (
                f"a cache whose last forward ended after {self.step.next_layer} of {layers} layers"
            )
            raise InvalidArgument("cache", given, "a complete cache; call reset() first")

    def _merged(
        self, num_rows: int, num_tokens: int, mask: torch.Tensor | None
    ) -> NDArray[np.bool_]:
        """Return a mask of the columns that are tokens, this step's columns included.

        The method waits for the device if there is a `mask`.
        """
        old = self.is_token if self.columns > 0 else np.zeros((num_rows, 0), dtype=np.bool_)
        if mask is None:
            merged = np.ones((num_rows, self.columns + num_tokens), dtype=np.bool_)
        else:
            merged = mask.cpu().numpy().copy()  # a copy, because the caller may write to the mask
        expected = (num_rows, self.columns + num_tokens)
        if merged.shape != expected:
            allowed = f"{[*expected]}: {self.columns} cached columns and {num_tokens} new columns"
            raise InvalidArgument("attention_mask", f"shape {[*merged.shape]}", allowed)
        if not np.array_equal(merged[:, : self.columns], old):
            given = "None" if mask is None else "another padding of cached columns"
            raise InvalidArgument(
                "attention_mask", given, "the padding with which the columns were cached"
            )
        return merged

    def _make_room(self, query_lens: Sequence[int], lengths: Sequence[int]) -> None:
        """Give every row blocks for its new tokens that it shares with no other row."""
        pool, size = self.pool, self.pool.config.block_size
        held: list[list[int]] = self.blocks if self.columns > 0 else [[] for _ in lengths]
        rows = list(zip(held, query_lens, lengths, strict=True))
        copied = []  # blocks of rows whose next token goes to a shared block
        owners: dict[int, int] = {}  # number of owners of these blocks, less the rows with a copy
        for blocks, new, length in rows:
            if new == 0 or (length - new) % size == 0:
                continue
            left = owners.setdefault(blocks[-1], pool.num_owners(blocks[-1]))
            if left > 1:
                copied.append(blocks)
                owners[blocks[-1]] = left - 1
        missing = [-(-length // size) - len(blocks) for blocks, _, length in rows]
        taken = pool.take(len(copied) + sum(missing))
        if copied:
            sources = [blocks[-1] for blocks in copied]
            targets = taken[-len(copied) :]
            try:
                pool.copy(sources, targets)
            except BaseException:
                pool.release(taken)
                raise
            del taken[-len(copied) :]
            pool.release(sources)
            for blocks, target in zip(copied, targets, strict=True):
                blocks[-1] = target
        for blocks, count in zip(held, missing, strict=True):
            blocks += [taken.pop() for _ in range(count)]
        self.blocks = held

    def gathered(self, layer: int) -> torch.Tensor:
        """Return a copy of one layer's latents and rotated keys, dtype [B, columns, R + P].

        Padding is 0.
        """
        latents = self.pool.latents[layer]
        out = latents.new_zeros((*self.is_token.shape, latents.shape[-1]))
        for row, (blocks, is_token) in enumerate(zip(self.blocks, self.is_token, strict=True)):
            columns = torch.tensor(np.flatnonzero(is_token), device=latents.device)
            held = latents[torch.tensor(blocks, dtype=torch.long, device=latents.device)]
            out[row, columns] = held.flatten(0, 1)[: len(columns)]
        return out

    def _lengths(self) -> list[int]:
        lengths: list[int] = self.is_token.sum(1).tolist()
        return lengths


def _lines(tensor: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor [B, H, T, width] as [n, H, width], with only the given `tokens`.

    ``None`` means all B * T tokens.
    """
    lines = tensor.transpose(1, 2).flatten(0, 1)
    return lines if tokens is None else lines.index_select(0, tokens)
