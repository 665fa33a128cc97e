"""Kernels of other projects that engines use, as far as this machine has them.

These are FlashMLA and FlashAttention 3 from vLLM, FlashInfer since 0.7, and the Triton decode
kernels of vLLM and SGLang. They are loaded from the folder of ``--peers``, which has the layout of
site-packages, or from the installed packages.
"""

from __future__ import annotations

import importlib
import lzma
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from paged_mla_optimized.tools.bench.cases import P, R
from paged_mla_optimized.tools.bench.problem import SCALE, Tensors

Launch = Callable[[], torch.Tensor]  # returns out, [B, query_len, H, R]
Prefill = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # (q, k, v), (cu_q, cu_k), lens, causal


def load(folder: Path | None) -> dict[str, Callable[[Tensors], Launch | None]]:
    """Return, by name, a function for each available kernel that builds its launch for a case.

    A function returns ``None`` for a case that its kernel cannot run.
    """
    if folder is not None:
        sys.path.insert(0, str(folder))
    found: dict[str, Callable[[Tensors], Launch | None]] = {}
    for name, (binary, build) in _BINARIES.items():
        if _load(folder, binary):
            found[name] = build
    for name, (module, build) in _MODULES.items():
        try:
            importlib.import_module(module)
        except ImportError:
            continue  # not on this machine
        found[name] = build
    return found


def load_flashmla_fp8(
    folder: Path | None,
) -> Callable[[Tensors, torch.Tensor, torch.Tensor], Launch | None]:
    """Return a function that builds a launch of FlashMLA's FP8 decode.

    The function takes a case, its e4m3 cache and the scale of the cache. It returns ``None`` for a
    case that the kernel cannot run, and always if the kernel is not available. The kernel gets
    queries in e4m3, with the smallest scale with which no query saturates.
    """
    is_there = _load(folder, "vllm/_flashmla_extension_C.abi3.so")

    def build(tensors: Tensors, codes: torch.Tensor, scale: torch.Tensor) -> Launch | None:
        case = tensors.case
        if not is_there or case.block_size != 64 or case.is_tree:
            return None
        ops = torch.ops._flashmla_extension_C
        pairs = case.query_len * case.num_heads
        plan = ops.get_mla_decoding_metadata_dense_fp8(tensors.seq_lens, pairs, 1)
        q_scale = tensors.q.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
        q = (tensors.q.float() / q_scale).to(torch.float8_e4m3fn)
        scales = (q_scale.view(1), scale.view(1))
        fixed = (q, codes.unsqueeze(2), R, tensors.seq_lens, tensors.block_table, SCALE, True)
        return lambda: ops.fwd_kvcache_mla_fp8(*fixed, *plan, *scales)[0]

    return build


def load_fa3(folder: Path | None) -> Prefill | None:
    """Return FlashAttention 3 over rows of different lengths, or ``None`` if it is missing."""
    if not _load(folder, _BINARIES["fa3"][0]):
        return None

    def attend(
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        starts: tuple[torch.Tensor, torch.Tensor],
        longest: tuple[int, int],
        causal: bool,  # noqa: FBT001 - the signature of the kernel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops._vllm_fa3_C.fwd(
            *heads, *[None] * 4, *starts, *[None] * 3, *longest, *[None] * 9, SCALE, causal,
            *(-1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None),
        )[:2]  # fmt: skip
        return out, lse

    return attend


def _load(folder: Path | None, binary: str) -> bool:
    """Load a library if it exists; return whether it exists."""
    path = _find(folder, binary)
    if path is not None:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # torch has no types
    return path is not None


def _find(folder: Path | None, binary: str) -> Path | None:
    """Return the path of a library, or ``None``; decompress a compressed library first."""
    for base in [Path(entry) for entry in sys.path] if folder is None else [folder]:
        if (base / binary).exists():
            return base / binary
        packed = base / (Path(binary).name.removeprefix("_vllm_").removesuffix("_C.abi3.so"))
        packed = packed.with_suffix(".so.xz")
        if packed.exists():
            target = Path(tempfile.mkdtemp(), Path(binary).name)
            target.write_bytes(lzma.decompress(packed.read_bytes()))
            return target
    return None


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Return the prefix sums of lengths, int32, with a leading 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _flashmla(tensors: Tensors) -> Launch | None:
    if tensors.case.block_size != 64 or tensors.case.is_tree:
        return None
    run = torch.ops._flashmla_C.dense_decode_fwd
    cache = tensors.cache.unsqueeze(2)
    fixed = (tensors.q, cache, R, tensors.seq_lens, tensors.block_table, SCALE, True)
    plan = run(*fixed, None, None, None)[2:]
    return lambda: run(*fixed, *plan, None)[0]


def _fa3(tensors: Tensors) -> Launch | None:
    case = tensors.case
    if case.is_tree:
        return None
    nope, rope = tensors.cache[..., :R].unsqueeze(2), tensors.cache[..., R:].unsqueeze(2)
    arguments = (
        tensors.q_pe, rope, nope, None, None, tensors.q_nope, None, tensors.cu_seqlens_q, None,
        None, None, tensors.seq_lens, case.query_len, max(case.seq_lens), tensors.block_table,
        *[None] * 8, SCALE, True, -1, -1, 0.0, True, None, 0, None, 0, None, 1, 0, None,
    )  # fmt: skip
    shape = (*tensors.q.shape[:3], R)
    return lambda: torch.ops._vllm_fa3_C.fwd(*arguments)[0].view(shape)


def _flashinfer(tensors: Tensors) -> Launch | None:
    case, cache = tensors.case, tensors.cache
    if case.is_tree:
        return None
    module = importlib.import_module(_MODULES["flashinfer"][0])
    counts = -(-tensors.seq_lens // case.block_size)
    starts = _starts(counts)
    entry = torch.arange(tensors.block_table.shape[1], device=cache.device)
    blocks = tensors.block_table[entry < counts[:, None]]
    workspace = torch.empty(128 << 20, dtype=torch.int8, device=cache.device)
    attention = module.BatchMLAPagedAttentionWrapper(workspace)
    attention.plan(
        metadata=module.MLAPlanMetadata.csr(tensors.cu_seqlens_q, starts, blocks, tensors.seq_lens),
        num_heads=case.num_heads, head_dim_ckv=R, head_dim_kpe=P, page_size=case.block_size,
        causal=True, sm_scale=SCALE, q_data_type=cache.dtype, kv_data_type=cache.dtype,
    )  # fmt: skip
    shape, q = (*tensors.q.shape[:3], R), tensors.q.flatten(0, 1)
    return lambda: attention.run(query=q, kv_cache=cache).view(shape)


def _vllm_triton(tensors: Tensors) -> Launch | None:
    case = tensors.case
    if case.query_len > 1:
        return None
    module = importlib.import_module(_MODULES["vllm_triton"][0])
    splits = min(1 << max(0, max(case.seq_lens) // 512 - 1).bit_length(), 264)
    rows, heads = len(case.seq_lens), case.num_heads
    logits = torch.empty(rows, heads, splits, R + 1, dtype=torch.float32, device="cuda")
    out = torch.empty(rows, heads, R, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(rows, heads, dtype=torch.bfloat16, device="cuda")
    one = torch.tensor(1.0, device="cuda")
    keys = tensors.cache.unsqueeze(2)

    def launch() -> torch.Tensor:
        module.decode_attention_fwd(
            tensors.q[:, 0], keys, keys[..., :R], out, lse, tensors.block_table, tensors.seq_lens,
            logits, splits, SCALE, case.block_size, k_scale=one, v_scale=one, is_mla=True,
        )  # fmt: skip
        return out.unsqueeze(1)

    return launch


def _sglang_triton(tensors: Tensors) -> Launch | None:
    case = tensors.case
    if case.query_len > 1:
        return None
    module = importlib.import_module(_MODULES["sglang_triton"][0])
    rows, heads, size = len(case.seq_lens), case.num_heads, case.block_size
    starts = _starts(tensors.seq_lens)
    slots = (tensors.block_table.long()[..., None] * size + torch.arange(size).cuda()).flatten(1)
    slots = torch.cat([line[:n] for line, n in zip(slots, case.seq_lens, strict=True)])
    splits = 16 if rows > 8 else 64
    counts = torch.full((rows,), splits, dtype=torch.int32, device="cuda")
    logits = torch.empty(rows, heads, splits, R, dtype=torch.float32, device="cuda")
    lse = torch.empty(rows, heads, splits, dtype=torch.float32, device="cuda")
    out = torch.empty(rows, heads, R, dtype=torch.bfloat16, device="cuda")
    keys = tensors.cache.flatten(0, 1).unsqueeze(1)

    def launch() -> torch.Tensor:
        module.decode_attention_fwd(
            tensors.q[:, 0], keys, keys[..., :R], out, starts, slots, logits, lse, counts, splits,
            SCALE, 1.0, 1.0, has_mla=True,
        )  # fmt: skip
        return out.unsqueeze(1)

    return launch


_BINARIES = {
    "flashmla": ("vllm/_flashmla_C.abi3.so", _flashmla),
    "fa3": ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", _fa3),
}
_MODULES = {
    "flashinfer": ("flashinfer.mla", _flashinfer),
    "vllm_triton": ("vllm.v1.attention.ops.triton_decode_attention", _vllm_triton),
    "sglang_triton": ("sglang.kernels.ops.attention.decode_attention", _sglang_triton),
}
