"""Record dumps of steps inside vLLM, with any of its MLA backends. This file imports no vLLM.

A dump contains the metadata that vLLM passes to the backend's builder, the arguments of
``forward_mqa`` and its results. It copies the metadata before the backend reads it. A backend that
misinterprets a length, a table or a scale therefore violates a rule in the dump; the inputs of its
kernel alone would not show the error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.engines.tensors import FLAT_FP8, split_queries
from paged_mla_optimized.inspect.samples import Samples, blocks_near
from paged_mla_optimized.runtime.arrays import to_numpy, to_numpy_spread
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dump import Dump
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.problem import Problem

_FP8_FORMATS = {torch.float8_e4m3fn: FLAT_FP8, torch.uint8: "fp8_ds_mla"}


@dataclass
class _Step:
    """A described step: the backend's metadata, and copies of the tensors that vLLM passed."""

    number: int
    metadata: Any
    said: dict[str, torch.Tensor]
    layer: int = 0


@dataclass(frozen=True)
class _Called:
    """The arguments of ``forward_mqa``, in vLLM's order."""

    impl: Any
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    cache: torch.Tensor
    metadata: Any
    layer: Any


class _Recorder:
    """Pass on the calls of a backend and write their arguments to :class:`Samples`."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._steps: dict[Any, _Step] = {}  # the latest of each builder

    def build(self, run: Callable[..., Any], builder: Any, *given: Any, **named: Any) -> Any:
        """Call ``build``, and keep copies of its inputs if the step is sampled."""
        before = self._steps.get(builder)
        number = 0 if before is None else before.number + 1
        common = named.get("common_attn_metadata", *given[1:2])
        # The copy comes first, because the backend may write to these tensors.
        said = _said(common) if self._samples.wants_step(number) else {}
        metadata = run(builder, *given, **named)
        self._steps[builder] = _Step(number, metadata, said)
        return metadata

    def forward_mqa(self, run: Callable[..., Any], impl: Any, *given: Any) -> Any:
        """Call ``forward_mqa``, and write a dump if the step and the layer are sampled."""
        answer = run(impl, *given)
        called = _Called(impl, *given)
        step = next((s for s in self._steps.values() if s.metadata is called.metadata), None)
        if step is not None:
            if step.said and self._samples.wants(step.number, step.layer):
                self._write(step, called, *answer)
            step.layer += 1
        return answer

    def _write(
        self, step: _Step, called: _Called, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        rows, tokens = step.metadata.num_decodes, step.metadata.num_decode_tokens
        q_nope, q_pe = split_queries(called.q, called.impl.kv_lora_rank)
        lengths = {"cu_seqlens_q": rows + 1, "seq_lens": rows, "block_table": rows, "slots": tokens}
        arrays = {name: to_numpy(step.said[name][:length]) for name, length in lengths.items()}
        cache = called.cache
        blocks = blocks_near(arrays["seq_lens"], arrays["block_table"], cache)
        size = cache[0].nbytes * len(blocks) + 2 * q_nope.nbytes
        if not self._samples.has_room(size):
            return
        arrays |= {
            "block_ids": blocks,
            "cache_after": to_numpy(cache[torch.from_numpy(blocks).to(cache.device)]),
            "q_nope": to_numpy_spread(q_nope),
            "q_pe": to_numpy_spread(q_pe),
            "out": to_numpy(out.reshape(q_nope.shape)),
        }
        if lse is not None and lse.dtype is torch.float32:  # 16 bits are not precise enough
            arrays["lse"] = to_numpy(_by_token(lse))
        dump = Dump(
            problem=_problem(called, q_nope, rows, int(arrays["seq_lens"].max())),
            arrays=arrays,
            origin=f"step {step.number}, {called.layer.layer_name}",
            lse_base="e" if called.impl.lse_base_on_e else "2",
        )
        self._samples.write(dump, f"{step.number:06}-{step.layer:03}")


def _said(common: Any) -> dict[str, torch.Tensor]:
    """Return copies of the tensors in which vLLM describes a step."""
    if common.dcp_local_seq_lens is not None:
        raise Unsupported(
            "decode context parallelism is not supported by record, because a rank's dump does "
            "not contain all keys; record with one rank"
        )
    return {
        "cu_seqlens_q": common.query_start_loc.clone(),
        "seq_lens": common.seq_lens.clone(),
        "block_table": common.block_table_tensor.clone(),
        "slots": common.slot_mapping.clone(),
    }


def _by_token(lse: torch.Tensor) -> torch.Tensor:
    """Return an lse as [T, H]; FlashMLA returns [B, H, T / B]."""
    return lse.transpose(1, 2).flatten(0, 1) if lse.dim() == 3 else lse


def _problem(called: _Called, q_nope: torch.Tensor, rows: int, longest: int) -> Problem:
    impl, cache = called.impl, called.cache
    if q_nope.dtype not in DTYPE_NAMES:
        raise Unsupported(
            f"queries of dtype {q_nope.dtype} are not supported by record; "
            f"use {', '.join(map(str, DTYPE_NAMES))}"
        )
    dtype = DTYPE_NAMES[q_nope.dtype]
    stored = _FP8_FORMATS.get(cache.dtype, PLAIN_FORMAT_OF_DTYPE[dtype])
    tokens, heads, rank = q_nope.shape
    return Problem(
        dims=MlaDims(heads, rank, impl.qk_rope_head_dim, impl.qk_nope_head_dim, impl.v_head_dim),
        dtype=dtype,
        cache_format=stored,
        cache_scale=float(called.layer._k_scale) if stored == FLAT_FP8 else 1.0,
        block_size=cache.shape[1],
        num_blocks=len(cache),
        max_rows=rows,
        max_query_tokens=tokens,
        max_model_len=longest,
        softmax_scale=impl.scale,
    )


@contextmanager
def record(
    backend: Any,
    folder: Path | str,
    *,
    every: int = 1,
    layers: Sequence[int] | None = None,
    most_bytes: int = 1 << 30,
) -> Iterator[Samples]:
    """Write dumps of the decode rows that vLLM passes to a backend, while the context is open.

    Only calls in this process are recorded. The number of a layer is the number of calls of
    ``forward_mqa`` since the step was described. A sampled layer waits for the device and copies
    every block that its rows use; other layers have no such cost. Calls inside a captured CUDA
    graph or a compiled function are not recorded. With decode context parallelism, or queries of
    an unsupported dtype, the sampled call of the backend raises ``Unsupported``.

    Parameters
    ----------
    backend : type
        The class of any MLA backend: ``PagedMlaBackend`` or a class of vLLM.
    folder, every, layers, most_bytes
        The arguments of :func:`paged_mla_optimized.record`.

    Yields
    ------
    Samples
        The files have the names ``step-layer.safetensors``.

    Raises
    ------
    InvalidArgument
        `every` is not an integer or is below 1, or a value of `layers` or `most_bytes` is not an
        integer or is below 0.
    """
    samples = Samples(folder, every, layers, most_bytes)
    recorder = _Recorder(samples)
    wrapped = (backend.get_builder_cls(), "build"), (backend.get_impl_cls(), "forward_mqa")
    inherited = [name not in vars(owner) for owner, name in wrapped]
    plain = [getattr(owner, name) for owner, name in wrapped]
    for (owner, name), run in zip(wrapped, plain, strict=True):
        setattr(owner, name, _through(getattr(recorder, name), run))
    try:
        yield samples
    finally:
        for (owner, name), run, is_inherited in zip(wrapped, plain, inherited, strict=True):
            if is_inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, run)


def _through(call: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that passes `run` and all its arguments to `call`."""

    @functools.wraps(run)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return call(run, self, *given, **named)

    return method
