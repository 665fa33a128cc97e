"""Check shapes, dtypes, strides and devices before every launch, without waiting for the device.

Every function raises ``InvalidArgument``, which names the argument, if a check fails.
"""

from __future__ import annotations

import torch

from paged_mla_optimized.config.arguments import check_kind, check_word, integer
from paged_mla_optimized.config.attention import TORCH_DTYPES, MlaConfig
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.overlap import Named, check_apart, check_places
from paged_mla_optimized.tensors.step import MlaStep, RequestMap
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, SCALE_DTYPE

_FIELD = 4  # bytes of an inline scale
_MAX_TOKEN_STRIDE = 1 << 24  # elements; offsets inside one tile are 32-bit


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtype: torch.dtype | None,
    device: torch.device | None,
    *,
    unit_stride: bool = False,
) -> None:
    """Check the shape, dtype and device of a tensor; ``None`` allows any value, also in a shape.

    With `unit_stride` the last axis must be dense, since kernels load vectors of it. Kernels read
    raw memory. Therefore views that torch negates or conjugates when it reads them, and layouts
    that are not strided, are rejected.
    """
    check_kind(name, tensor, torch.Tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        given = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        raise InvalidArgument(name, given, "a dense or strided tensor")
    if tensor.is_neg() or tensor.is_conj():
        given = "a view that torch negates or conjugates when it reads it"
        raise InvalidArgument(name, given, "a copy from resolve_neg() or resolve_conj()")
    if dtype is not None and tensor.dtype != dtype:
        raise InvalidArgument(name, tensor.dtype, str(dtype))
    if tensor.shape != shape and not _fits(tensor.shape, shape):
        expected = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise InvalidArgument(name, f"shape {list(tensor.shape)}", expected)
    if device is not None and tensor.device != device:
        raise InvalidArgument(name, f"on {tensor.device}", str(device))
    if unit_stride and tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise InvalidArgument(name, f"last stride {tensor.stride(-1)}", "1")


def check_token_stride(name: str, stride: int) -> None:
    """Check that the stride of tokens, in elements, is less than 2 ** 24."""
    if stride >= _MAX_TOKEN_STRIDE:
        raise InvalidArgument(name, f"token stride {stride}", f"< {_MAX_TOKEN_STRIDE}")


def answers(
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    read: Named,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `out`, of `shape`, and `lse`, after checks; allocate each that is ``None``.

    Tensors of the caller must not overlap the tensors in `read`.
    """
    is_given = out is not None or lse is not None
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    if lse is None:
        lse = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    check_tensor("out", out, shape, dtype, device, unit_stride=True)
    check_tensor("lse", lse, shape[:-1], torch.float32, device)
    check_places(out=out, lse=lse)
    if is_given:
        check_apart({"out": out, "lse": lse}, read)
    return out, lse


def _fits(shape: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        n is None or size == n for size, n in zip(shape, wanted, strict=True)
    )


def check_lengths(config: MlaConfig, step: MlaStep, device: torch.device) -> None:
    """Check the lengths and the block table of a step, and that it fits the config's capacities."""
    check_kind("step", step, MlaStep)
    seq_lens, cu_seqlens_q, block_table = step.seq_lens, step.cu_seqlens_q, step.block_table
    if block_table is None:  # some engines have none where nothing is cached
        raise InvalidArgument("block_table", None, "int32 [B, M]; M may be 0 if no row has tokens")
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, device)
    num_rows = seq_lens.shape[0]
    check_tensor("cu_seqlens_q", cu_seqlens_q, (num_rows + 1,), torch.int32, device)
    if isinstance(block_table, RequestMap):
        if config.table_multiple == 0:
            raise InvalidArgument("block_table", "a request map", "a tensor if table_multiple is 0")
        check_tensor("req_to_token", block_table.req_to_token, (None, None), torch.int32, device)
        ids = block_table.request_ids
        check_kind("request_ids", ids, torch.Tensor)
        if ids.dtype not in {torch.int32, torch.int64}:
            raise InvalidArgument("request_ids", ids.dtype, "int32 or int64")
        check_tensor("request_ids", ids, (num_rows,), None, device)
    else:
        check_tensor("block_table", block_table, (num_rows, None), torch.int32, device)
    check_capacity(config, num_rows, integer("num_tokens", step.num_tokens))


def check_capacity(
    config: MlaConfig,
    num_rows: int,
    num_tokens: int,
    *,
    rows: str = "seq_lens",
    tokens: str = "num_tokens",
) -> None:
    """Check that a step fits the capacities of the config.

    `rows` and `tokens` are the names of the arguments that determine B and T.
    """
    if num_rows > config.max_rows:
        raise InvalidArgument(rows, f"{num_rows} rows", f"at most max_rows = {config.max_rows}")
    if not 0 <= num_tokens <= config.max_query_tokens:
        allowed = f"0 to max_query_tokens = {config.max_query_tokens}"
        raise InvalidArgument(tokens, num_tokens, allowed)


def check_step(config: MlaConfig, step: MlaStep, device: torch.device) -> None:
    """Check the tensors of a step, including the mask that the config requires."""
    check_lengths(config, step, device)
    check_mask(config, step.mask, step.num_tokens, device)


def check_mask(
    config: MlaConfig, mask: torch.Tensor | None, num_tokens: int, device: torch.device
) -> None:
    """Check that a mask is passed exactly if the config has trees, and in the config's spelling."""
    if not config.is_tree:
        if mask is not None:
            raise InvalidArgument(
                "mask", "a mask", f"None, since the config's mask is {config.mask}"
            )
        return
    if mask is None:
        raise InvalidArgument("mask", None, f"a tensor, since the config's mask is {config.mask}")
    if config.mask != "tree:packed":
        check_tensor("mask", mask, (None,), torch.bool, device)
        return
    check_tensor("mask", mask, (num_tokens, None), torch.uint8, device)
    if 8 * mask.shape[1] < config.max_draft_tokens:
        needed = f"at least {-(-config.max_draft_tokens // 8)} bytes per line"
        raise InvalidArgument("mask", f"{mask.shape[1]} bytes per line", needed)


def check_planned(call: str, tokens: object, num_tokens: int) -> None:
    """Raise an error if tokens are passed without a planned step; it names `call`, not a shape."""
    if num_tokens == 0 and isinstance(tokens, torch.Tensor) and tokens.ndim and len(tokens):
        given = f"{len(tokens)} tokens, but no step with tokens is planned"
        raise InvalidArgument(call, given, "a call after plan(...)")


def check_latents(
    config: MlaConfig,
    ckv: torch.Tensor,
    k_pe: torch.Tensor,
    num_tokens: int | None,
    device: torch.device,
) -> None:
    """Check the latents and keys of `num_tokens` tokens; ``None`` allows any number."""
    shape = (num_tokens, config.kv_lora_rank)
    check_tensor("ckv", ckv, shape, config.dtype, device, unit_stride=True)
    shape = (ckv.shape[0], config.qk_rope_head_dim)
    check_tensor("k_pe", k_pe, shape, config.dtype, device, unit_stride=True)


def check_queries(
    config: MlaConfig,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    num_tokens: int,
    device: torch.device,
) -> None:
    """Check the queries of a step."""
    shape = (num_tokens, config.num_heads, config.kv_lora_rank)
    check_tensor("q_nope", q_nope, shape, config.dtype, device, unit_stride=True)
    shape = (num_tokens, config.num_heads, config.qk_rope_head_dim)
    check_tensor("q_pe", q_pe, shape, config.dtype, device, unit_stride=True)


def check_cache(config: MlaConfig, cache: LatentCache, device: torch.device) -> None:
    """Check a cache of the config's format: latents [num_blocks, block_size, width], and scales."""
    stored, latents = config.stored, cache.latents
    shape = (None, config.block_size, stored.row(config)[1])
    dtype = torch.uint8 if config.is_fp8 else config.dtype
    check_tensor("cache", latents, shape, dtype, device, unit_stride=True)
    if stored.inline_scales and any(stride % _FIELD for stride in latents.stride()[:2]):
        given = f"strides {latents.stride()}"
        raise InvalidArgument(
            "cache", given, f"block and token strides that are multiples of {_FIELD}"
        )
    check_token_stride("cache", latents.stride(1))
    check_scales(cache, config.block_size, device)


def check_scales(cache: LatentCache, block_size: int, device: torch.device) -> None:
    """Check that a cache has the scale tensor of its format, and none if the format has none."""
    check_word("cache.format", cache.format, FORMATS)
    expected = FORMATS[cache.format].scale_shape(cache.latents.shape[0], block_size)
    if cache.scales is None and expected is not None:
        allowed = f"a LatentCache with {SCALE_DTYPE} {list(expected)}"
        raise InvalidArgument("cache.scales", None, allowed)
    if cache.scales is not None:
        if expected is None:
            raise InvalidArgument("cache.scales", "a tensor", f"None in {cache.format}")
        dtype = TORCH_DTYPES[SCALE_DTYPE]
        has_axes = len(expected) > 0
        check_tensor("cache.scales", cache.scales, expected, dtype, device, unit_stride=has_axes)


def check_written_cache(latents: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Check that the tokens of a cache that is written do not overlap each other."""
    check_places(cache=latents)
    if scales is not None:
        check_places(**{"cache.scales": scales})


def check_address(cache: LatentCache) -> None:
    """Check that a cache with inline scales begins at a multiple of 4 bytes."""
    misplaced = cache.latents.data_ptr() % _FIELD
    if misplaced:
        given = f"an address {misplaced} past a multiple of {_FIELD}"
        raise InvalidArgument("cache", given, f"a multiple of {_FIELD} bytes")
