"""The adapter to the conformance suite's backend protocol: NumPy in, NumPy out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import paged_mla_optimized
from paged_mla_optimized import checks
from paged_mla_optimized.api import PagedMla
from paged_mla_optimized.arrays import to_numpy, to_torch
from paged_mla_optimized.config import DTYPE_NAMES, MASKS, MlaConfig
from paged_mla_optimized.device import is_interpreting
from paged_mla_optimized.merge import merge_partials
from paged_mla_shared.backend import Capabilities, mask_name
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FEATURES = frozenset(
    {
        "mixed", "padding", "replay", "strided_cache", "strided_inputs", "explicit_slots",
        "validation",
    }
)  # fmt: skip


def create() -> TritonBackend:
    """Return the backend on the first CUDA device, or in Triton's interpreter.

    Raises
    ------
    RuntimeError
        There is neither a GPU nor ``TRITON_INTERPRET=1``.
    """
    if is_interpreting():
        return TritonBackend(mode="interpreter", device="Triton interpreter (CPU)")
    if torch.cuda.is_available():
        return TritonBackend(mode="gpu", device=torch.cuda.get_device_name())
    raise RuntimeError("paged_mla_optimized needs a CUDA device, or TRITON_INTERPRET=1 for a CPU")


@dataclass(frozen=True, kw_only=True)
class TritonBackend:
    """See :class:`paged_mla_shared.backend.Backend`."""

    mode: str
    device: str
    name: str = "paged-mla-optimized"
    version: str = paged_mla_optimized.__version__

    @property
    def memory_bytes(self) -> int:
        """Bytes free for one cache."""
        if self.mode == "gpu":
            return int(torch.cuda.mem_get_info()[0])
        return 1 << 30  # the interpreter is no place for more

    @property
    def capabilities(self) -> Capabilities:
        """Everything but bfloat16 and huge caches in the interpreter, which computes neither."""
        on_gpu = self.mode == "gpu"
        dtypes = {"float32", "float16"} | ({"bfloat16"} if on_gpu else set())
        return Capabilities(
            ops=frozenset({"plan", "append", "attend", "merge", "gather_context"}),
            dtypes=frozenset(dtypes),
            cache_formats=frozenset(_FORMATS[name] for name in dtypes),
            block_sizes=frozenset(range(1, 257)),
            num_heads=frozenset(range(1, 129)),
            head_dims=frozenset({(512, 64), (256, 32), (32, 16)}),
            masks=frozenset(MASKS),
            ropes=frozenset({"interleaved", "neox"}),
            features=_FEATURES | ({"large_offsets"} if on_gpu else set()),
            max_query_len=1 << 20,
        )

    def prepare(self, problem: Problem) -> TritonRunner:
        """Build a runner; raises ``InvalidArgument`` or ``Unsupported``."""
        config = _config(problem)
        if unmet := self.capabilities.unmet(problem, (), ()):
            raise Unsupported("; ".join(unmet))
        return TritonRunner(problem, config, "cuda" if self.mode == "gpu" else "cpu")


def _config(problem: Problem) -> MlaConfig:
    if problem.dtype not in _DTYPES:
        raise InvalidArgument("dtype", problem.dtype, ", ".join(_DTYPES))
    if problem.num_blocks < 1:
        raise InvalidArgument("num_blocks", problem.num_blocks, ">= 1")
    config = MlaConfig(
        num_heads=problem.dims.num_heads,
        softmax_scale=problem.softmax_scale,
        block_size=problem.block_size,
        max_rows=problem.max_rows,
        max_query_tokens=problem.max_query_tokens,
        max_model_len=problem.max_model_len,
        kv_lora_rank=problem.dims.kv_lora_rank,
        qk_rope_head_dim=problem.dims.qk_rope_head_dim,
        dtype=_DTYPES[problem.dtype],
        cache_format=problem.cache_format,
        mask=mask_name(problem),
        max_draft_tokens=problem.max_draft_tokens,
        rope=problem.rope,
    )
    itemsize = numpy_dtype(problem.dtype).itemsize
    for name in ("token_padding", "block_padding"):
        padding = getattr(problem, name)
        if padding < 0 or padding % itemsize:
            raise InvalidArgument(name, padding, f"a multiple of {itemsize} bytes, >= 0")
    return config


class TritonRunner:
    """See :class:`paged_mla_shared.backend.Runner`."""

    def __init__(self, problem: Problem, config: MlaConfig, device: str) -> None:
        self._problem = problem
        self._mla = PagedMla(config, device)
        self._storage: torch.Tensor | None = None  # uint8, block after block
        self._planned: Batch | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def load_cache(self, image: CacheImage) -> None:
        """Make the cache equal `image`; only its live blocks cross from the host."""
        layout = self._problem.layout
        if image.layout != layout:
            raise InvalidArgument("image", "another layout", "the problem's")
        device = self._mla.device
        self._storage = None  # there may be no room for two
        storage = torch.empty(layout.storage_bytes, dtype=torch.uint8, device=device)
        storage.view(-1, len(image.poison)).copy_(to_torch("poison", image.poison, device))
        ids = to_torch("block_ids", image.block_ids, device)
        storage.view(layout.num_blocks, -1)[ids] = to_torch("blocks", image.blocks, device)
        self._storage = storage

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return raw bytes uint8 [n, block_stride]."""
        ids = to_torch("block_ids", block_ids, self._mla.device)
        return to_numpy(self._bytes().view(self._problem.num_blocks, -1)[ids])

    def plan(self, batch: Batch) -> Metadata:
        """Check and plan `batch`; return its positions and slots."""
        self._prepare(batch)
        return Metadata(to_numpy(self._mla.positions), to_numpy(self._mla.slot_mapping))

    def append(self, batch: Batch) -> None:
        """Write the batch's latents."""
        tensors = self._prepare(batch)
        slots = tensors.get("slot_mapping")
        self._mla.append(tensors["ckv"], tensors["k_pe"], self._cache(), slots)

    def attend(self, batch: Batch) -> Output:
        """Attend into buffers full of NaN, so that what is left unwritten shows."""
        tensors = self._prepare(batch)
        q_nope, q_pe = tensors["q_nope"], tensors["q_pe"]
        out = torch.full(q_nope.shape, torch.nan, dtype=q_nope.dtype, device=q_nope.device)
        lse = torch.full(q_nope.shape[:2], torch.nan, device=q_nope.device)
        self._mla.attend(q_nope, q_pe, self._cache(), out=out, lse=lse)
        return Output(to_numpy(out), to_numpy(lse))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partials."""
        if not partials:
            raise InvalidArgument("partials", "none", "at least one")
        device = self._mla.device
        outs = torch.stack([to_torch("out", partial.out, device) for partial in partials])
        lses = torch.stack([to_torch("lse", partial.lse, device) for partial in partials])
        out, lse = merge_partials(outs, lses)
        return Output(to_numpy(out), to_numpy(lse))

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Read every row's cached latents and keys, row after row."""
        self._prepare(batch)
        config, device = self._mla.config, self._mla.device
        keys = int(batch.seq_lens.sum())
        ckv, k_pe = (
            torch.empty(keys, width, dtype=config.dtype, device=device)
            for width in (config.kv_lora_rank, config.qk_rope_head_dim)
        )
        self._mla.gather_context(self._cache(), ckv, k_pe)
        return to_numpy(ckv), to_numpy(k_pe)

    def _prepare(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Check and plan `batch` unless it is the planned one; return its tensors."""
        if batch is self._planned:
            return self._tensors
        device, config = self._mla.device, self._mla.config
        tensors = {
            name: to_torch(name, array, device)
            for name, array in vars(batch).items()
            if array is not None
        }
        num_tokens = batch.num_tokens
        checks.check_queries(config, tensors["q_nope"], tensors["q_pe"], num_tokens, device)
        checks.check_latents(config, tensors["ckv"], tensors["k_pe"], num_tokens, device)
        lengths = (tensors["cu_seqlens_q"], tensors["seq_lens"], tensors["block_table"])
        self._mla.check(
            *lengths,
            num_blocks=self._problem.num_blocks,
            num_tokens=num_tokens,
            mask=tensors.get("mask"),
            slot_mapping=tensors.get("slot_mapping"),
        )
        self._mla.plan(*lengths, num_tokens=num_tokens, mask=tensors.get("mask"))
        self._planned, self._tensors = batch, tensors
        return tensors

    def _bytes(self) -> torch.Tensor:
        if self._storage is None:
            size = self._problem.layout.storage_bytes
            self._storage = torch.zeros(size, dtype=torch.uint8, device=self._mla.device)
        return self._storage

    def _cache(self) -> torch.Tensor:
        """View the storage as [num_blocks, block_size, R + P]."""
        layout = self._problem.layout
        elements = self._bytes().view(self._mla.config.dtype)
        itemsize = elements.element_size()
        return elements.as_strided(
            (layout.num_blocks, layout.block_size, layout.dims.cached_dim),
            (layout.block_stride // itemsize, layout.token_stride // itemsize, 1),
        )
