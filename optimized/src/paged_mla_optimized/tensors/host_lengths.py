"""The lengths of a step on the host, and their comparison with the lengths on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.arguments import integer
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.checks import check_capacity, check_tensor
from paged_mla_optimized.tensors.step import MlaStep, lengths_of
from paged_mla_shared.errors import InvalidArgument


@dataclass(frozen=True)
class HostLengths:
    """The lengths of a step, as arrays on the host.

    Parameters
    ----------
    query_lens : int64 [B]
        Query lengths, equal to those of ``cu_seqlens_q``.
    max_seq_lens : int64 [B] or None
        Upper bounds of ``seq_lens``; ``None`` if the step has no ``max_seq_lens``.
    """

    query_lens: NDArray[np.int64]
    max_seq_lens: NDArray[np.int64] | None

    @classmethod
    def of(cls, config: MlaConfig, step: MlaStep) -> HostLengths | None:
        """Return the lengths of a step on the host, or ``None`` if it has none.

        Raises
        ------
        InvalidArgument
            The lengths break a rule, or contradict the step or each other.
        """
        if step.query_lens is None:
            if step.max_seq_lens is not None:
                raise InvalidArgument("max_seq_lens", step.max_seq_lens, "None without query_lens")
            return None
        if step.max_query_len is not None:
            allowed = "None if query_lens are passed"
            raise InvalidArgument("max_query_len", step.max_query_len, allowed)
        check_tensor("seq_lens", step.seq_lens, (None,), torch.int32, None)
        num_rows, num_tokens = step.num_rows, integer("num_tokens", step.num_tokens)
        check_capacity(config, num_rows, num_tokens)
        queries = lengths_of("query_lens", step.query_lens, num_rows)
        if queries.sum() > num_tokens:
            given = f"{queries.sum()} in all"
            raise InvalidArgument("query_lens", given, f"up to num_tokens = {num_tokens}")
        if step.max_seq_lens is None:
            return cls(queries, None)
        keys = lengths_of("max_seq_lens", step.max_seq_lens, num_rows)
        short = (keys < queries) & (keys > 0)
        if config.mask != "non_causal" and short.any():
            row = int(short.argmax())
            given = f"{keys[row]} in row {row}"
            raise InvalidArgument("max_seq_lens", given, f"0, or at least {queries[row]} queries")
        longest = config.max_model_len
        if keys.max(initial=0) > longest:
            raise InvalidArgument("max_seq_lens", keys.max(), f"up to max_model_len = {longest}")
        return cls(queries, keys)

    @property
    def known_seq_lens(self) -> NDArray[np.int64]:
        """The ``max_seq_lens``; raises ``InvalidArgument`` if the step has none."""
        if self.max_seq_lens is None:
            raise InvalidArgument("max_seq_lens", None, "a sequence, since query_lens are passed")
        return self.max_seq_lens

    @property
    def max_query_len(self) -> int:
        """The largest query length of a row, at least 1."""
        return int(self.query_lens.max(initial=1))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.query_lens.sum())

    def leading(self, num_rows: int) -> HostLengths:
        """Return the lengths of the first `num_rows` rows."""
        keys = self.max_seq_lens
        return HostLengths(self.query_lens[:num_rows], None if keys is None else keys[:num_rows])

    def keys_from(self, row: int) -> int:
        """Return the sum of `max_seq_lens` over the rows from `row` on that have a query."""
        return int(np.where(self.query_lens[row:] > 0, self.known_seq_lens[row:], 0).sum())

    def check(self, step: MlaStep) -> None:
        """Compare these lengths with those on the device; waits for the device.

        Raises
        ------
        InvalidArgument
            A query length differs, or a ``seq_len`` exceeds its upper bound.
        """
        held = np.diff(step.cu_seqlens_q.cpu().numpy())
        differ = self.query_lens != held
        if differ.any():
            row = int(differ.argmax())
            given = f"{self.query_lens[row]} in row {row}"
            allowed = f"{held[row]}, the length in cu_seqlens_q on the device"
            raise InvalidArgument("query_lens", given, allowed)
        if self.max_seq_lens is None:
            return
        seq_lens = step.seq_lens.cpu().numpy()
        short = self.max_seq_lens < seq_lens
        if short.any():
            row = int(short.argmax())
            given = f"{self.max_seq_lens[row]} in row {row}"
            allowed = f"at least {seq_lens[row]}, the length in seq_lens on the device"
            raise InvalidArgument("max_seq_lens", given, allowed)
