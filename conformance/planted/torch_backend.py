"""A plain torch backend: right, on the CPU, one row at a time, each step a method to replace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_mla_reference.validate import validate_batch, validate_partials, validate_problem
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import (
    Batch,
    Mask,
    Metadata,
    Output,
    Problem,
)
from planted.attention import Attention, combine
from planted.indexing import Indexing, Row
from planted.memory import Memory, to_numpy, to_torch
from planted.rotation import Rotation

CAPABILITIES = Capabilities(
    ops=frozenset({"plan", "append", "attend", "merge", "gather_context"}),
    dtypes=frozenset(PLAIN_FORMAT_OF_DTYPE),
    cache_formats=frozenset(PLAIN_FORMAT_OF_DTYPE.values()),
    block_sizes=frozenset(range(1, 257)),
    num_heads=frozenset(range(1, 129)),
    head_dims=frozenset((d.kv_lora_rank, d.qk_rope_head_dim) for d in PRESETS.values()),
    masks=frozenset({"causal", "non_causal", "tree:qlen", "tree:full", "tree:packed"}),
    ropes=frozenset({"interleaved", "neox"}),
    features=frozenset(
        {"mixed", "padding", "replay", "strided_cache", "strided_inputs", "explicit_slots"}
        | {"large_offsets", "validation"}
    ),
    max_query_len=1 << 17,
)


class TorchRunner(Indexing, Rotation, Attention):
    """One prepared problem with its cache."""

    def __init__(self, problem: Problem) -> None:
        validate_problem(problem)
        unmet = CAPABILITIES.unmet(problem, (), ())
        if unmet:
            raise Unsupported("; ".join(unmet))
        super().__init__(problem)
        self.memory: Memory

    def load_cache(self, image: CacheImage) -> None:
        """Make the cache equal `image`."""
        self.memory = Memory(image, self.dtype)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return raw bytes of those blocks."""
        return to_numpy(self.memory.bytes_of(to_torch(block_ids)))

    def plan(self, batch: Batch) -> Metadata:
        """Return positions and slots (S-1, S-3)."""
        validate_batch(self.problem, batch)
        positions, slots = self.derive(batch)
        return Metadata(positions=to_numpy(positions), slot_mapping=to_numpy(slots))

    def append(self, batch: Batch) -> None:
        """Write the batch's latents and keys (S-10)."""
        validate_batch(self.problem, batch)
        positions, _ = self.derive(batch)
        slots = self.append_slots(batch)
        k_pe = self.turn_keys(to_torch(batch.k_pe), positions)
        tokens = torch.cat([to_torch(batch.ckv), k_pe], dim=1)  # [T, R+P]
        self.memory.write(self.addresses(slots[slots >= 0]), tokens[slots >= 0])

    def attend(self, batch: Batch) -> Output:
        """Attend every query to the cache (S-4 to S-7)."""
        validate_batch(self.problem, batch)
        dims = self.problem.dims
        out = torch.zeros(batch.num_tokens, dims.num_heads, dims.kv_lora_rank)
        lse = torch.full((batch.num_tokens, dims.num_heads), -math.inf)
        for row in self.attended_rows(batch):
            queries, keys = self.queries(batch, row), self.keys(batch, row)
            out[row.tokens], lse[row.tokens] = self.attend_row(queries, keys, self.visible(row))
        return self.output(batch, out.to(self.dtype), lse)

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partials (S-8)."""
        validate_partials(partials)
        outs = torch.stack([to_torch(partial.out) for partial in partials])  # [n, T, H, R]
        lses = torch.stack([to_torch(partial.lse) for partial in partials])  # [n, T, H]
        out, lse = combine(outs, lses, self.merge_base(lses))
        return Output(out=to_numpy(out), lse=to_numpy(lse))

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return every row's cached tokens."""
        validate_batch(self.problem, batch)
        slots = [self.context_slots(row) for row in self.rows(batch)]
        tokens = self.gathered(torch.cat([torch.zeros(0, dtype=torch.int64), *slots]))
        rank = self.problem.dims.kv_lora_rank
        return to_numpy(tokens[:, :rank].clone()), to_numpy(tokens[:, rank:].clone())

    def gathered(self, slots: Tensor) -> Tensor:
        """Return the cached tokens of `slots`, [n, R+P]."""
        return self.memory.read(self.addresses(slots), self.problem.dims.cached_dim)

    def attended_rows(self, batch: Batch) -> list[Row]:
        """Return the rows that have queries."""
        return [row for row in self.rows(batch) if row.query_len]

    def queries(self, batch: Batch, row: Row) -> Tensor:
        """Return a row's queries, float32 [q, H, R+P]."""
        q_pe = self.rotate(to_torch(batch.q_pe[row.tokens]), self.positions(row))
        return torch.cat([to_torch(batch.q_nope[row.tokens]), q_pe], dim=2).float()

    def keys(self, batch: Batch, row: Row) -> Tensor:  # noqa: ARG002  # bugs look at the batch
        """Return a row's cached tokens, float32 [K, R+P]."""
        return self.gathered(self.slots(row.table, torch.arange(row.seq_len))).float()

    def visible(self, row: Row) -> Tensor:
        """Return which key each query of a row sees, bool [q, K] (S-4)."""
        if self.problem.mask is Mask.NON_CAUSAL:
            return torch.ones(row.query_len, row.seq_len, dtype=torch.bool)
        if row.tree is not None:
            context = torch.ones(row.query_len, row.context_len, dtype=torch.bool)
            return torch.cat([context, row.tree], dim=1)
        last = row.context_len + torch.arange(row.query_len)
        return torch.arange(row.seq_len) <= last[:, None]

    def output(self, batch: Batch, out: Tensor, lse: Tensor) -> Output:  # noqa: ARG002  # ditto
        """Return the answer as NumPy."""
        return Output(out=to_numpy(out), lse=to_numpy(lse))


class TorchBackend:
    """The backend, of right runners or of wrong ones."""

    version = torch.__version__
    mode = "cpu"
    device = "CPU"
    memory_bytes = 1 << 40  # blocks never written take none
    capabilities = CAPABILITIES

    def __init__(self, runner: type[TorchRunner] = TorchRunner) -> None:
        self.name = runner.__name__
        self.runner = runner

    def prepare(self, problem: Problem) -> TorchRunner:
        """Build a runner."""
        return self.runner(problem)


def create() -> TorchBackend:
    """Make the right backend."""
    return TorchBackend()
